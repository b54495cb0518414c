"""The viewer: a store in the browser (``casstore ui``), and a session as one HTML file.

``views`` reads a store and returns the data of each page, of bounded size; ``server`` answers
requests, and ``security`` refuses those of others; ``templates`` and ``static`` are what a browser
gets; ``actions`` changes the store, if the viewer was started with ``--write``; ``export`` writes
a session to a file.
"""
