"""What benches draw or list to judge: graphs, plans, mutations, ops, files."""
