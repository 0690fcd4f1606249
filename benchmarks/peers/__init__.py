"""One worker script per server that is compared, run by that server's own interpreter; `session` drives them."""
