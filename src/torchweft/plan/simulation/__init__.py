"""What the simulator asks on its way: the price of a step, and the bytes that are alive."""
