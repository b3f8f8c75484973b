"""The checker of annotated signatures under pytest: beartype, with an int accepted where a float is asked for."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
