"""The accelerator runtime: lanes are streams of a device, plans may be device graphs."""
