"""The maximisation by rounds of messages: steps of the sites, and the protocols that ask them."""
