"""The endpoint picker, which tells an Envoy gateway to which router a request goes. It needs `baton-serve[picker]`."""
