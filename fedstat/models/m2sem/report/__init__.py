"""What is printed and drawn of clusters over institutions."""
