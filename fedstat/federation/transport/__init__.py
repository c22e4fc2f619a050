"""Transport: moving messages between the coordinator and the sites."""
