"""The service between nodes and center: what is said (`messages`), who says it (`client`), and who answers (`app`)."""
