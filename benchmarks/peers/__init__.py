"""One worker script per server under comparison, run by that server's own interpreter; `workers` drives them."""
