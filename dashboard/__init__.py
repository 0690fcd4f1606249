"""A bounded record of steps, requests and transfers, and the page that shows it."""
