"""Format × engine: blobs and values as a caller knows them.

``pieces`` is the border: verified reading, batched writing. Above it ``blobs``
(bytes of any length), ``values`` (put and get whole), ``view`` (read a part),
``edit`` (change a part) and ``diff`` (compare two).
"""
