"""Hosts: what a system that runs models needs to run them by plans, one file a host.

A file here may import its host and everything of ours; only benches import it.
"""
