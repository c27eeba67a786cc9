"""Numbers that a script logs itself: loss, learning rate, …"""
