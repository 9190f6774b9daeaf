"""K-FAC: Distributed K-FAC, KAISA and DP-KFAC."""
