"""The viewer: a store in the browser (``casstore ui``), and a session as one HTML file.

``views`` reads a store and returns the data of each page, bounded; ``server`` answers requests
and guards them; ``templates`` and ``static`` are what a browser gets; ``actions`` changes the
store, if the viewer was started with ``--write``; ``export`` writes a session to a file.
"""
