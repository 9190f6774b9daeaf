// `Worker` for pages that are opened as files, where browsers refuse workers: it
// runs the script in a hidden frame. The search of the theme needs it.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.element = document.createElement("iframe");
      this.element.hidden = true;
      document.body.append(this.element);
      this.frame = this.element.contentWindow;
      const page = this.frame.document;
      page.open(); // or Firefox replaces the empty page later
      page.write("<body></body>");
      page.close();
      this.frame.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      this.loaded = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
      });
      script.src = new URL(url, document.baseURI).href;
      page.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.frame.dispatchEvent(new this.frame.MessageEvent("message", { data }))
      );
    }

    terminate() {
      this.element.remove();
    }
  };
}
