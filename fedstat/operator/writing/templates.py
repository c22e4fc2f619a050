"""Files that the command writes for people to fill in."""

from __future__ import annotations

SITE = """\
# This institution, as 'fedstat site serve' opens it. What others will see of it:
#     fedstat site check {folder}

name = {name}

{layout}

# Folder through which signed questions come and signed answers go (shared, synchronised, or carried by hand),
# or a bucket of an object store, "s3://BUCKET/PREFIX".
# Leave it out where another carrier brings them.
{exchange}

# Secret of 128 bits, the same at all institutions and not known to the coordinator: for random projections,
# and for labels of clusters that several institutions hold. One owner draws it: fedstat site seed {folder}
seed = ""

# Fingerprint of the only key whose questions are answered. Enter it with: fedstat site pin FOLDER CARD
coordinator = ""

# Where the records are. A relative path is relative to this file.
[data]
kind = {kind}          # one of {kinds}
path = {path}
{key}    # columns that tell records apart; no model sees them
# na_values = ["", "NA"]  # how a missing cell of a text file is written
#
# A database, which is only read, once when the site is started; its address stands in an environment
# variable, and in no file:
# kind = "sql"
# query = "SELECT patient_id, age, sex FROM admissions"
# key = "patient_id"
# env = "WARD_DATABASE"   # holds e.g. postgresql://reader:secret@host/ward
# memory = 256            # megabytes of rows in memory; more are in a sealed file in this folder
# timeout = 3600          # seconds that the database may work on one statement

# What columns hold: "numbers", "whole numbers", "text", "true/false" or "dates", and their unit.
# [data.schema]
# age = {{ type = "numbers", unit = "years" }}
# sex = "text"

# Fingerprints of the institutions that this one makes masks with, its own among them.
[pinned]
{name} = {fingerprint}

# Vertical layout: consent to one alignment of keys with each of these. Enter it with:
#     fedstat site consent FOLDER SITE ...
[consent]

# Rosters of the federation that were accepted, by number. Enter one with:  fedstat site accept FOLDER
[roster]
"""

BY_ROWS = """\
# Column under which a formula may ask for the institution itself, as in C(site); the same everywhere.
site_column = "site\""""

BY_KEY = """\
# The institutions hold different columns of entities that they share, which are linked by the key below. None
# sees the key of another: 'fedstat federation align' numbers the entities, and the numbers are kept here."""

FEDERATION = """\
# The sites that ClientPartition.connect("federation.toml") asks.

name = {name}
{layout}
{carried}
timeout = 3600            # seconds until a site counts as silent
min_count = 5             # fewest rows of a category level in a design

# Fingerprint of every site, in the order of the partition. Add one with:
#     fedstat federation join {folder} CARD
[sites]

# Keys of sites that were taken out. Take one out with:  fedstat federation remove {folder} SITE
[revoked]
"""

ROWS = """\
layout = "horizontal"     # sites hold different rows of the same columns"""

COLUMNS = """\
layout = "vertical"       # sites hold different columns of entities that they share
# coordinator = "apart"   # or the site at whose institution this folder is: its values then leave nothing"""

BY_FOLDER = """\
carrier = "folder"
exchange = {exchange}     # relative to this file; every site's 'exchange' is the same folder"""

BY_BUCKET = """\
carrier = "bucket"        # objects of a store such as S3; credentials and endpoint as boto3 finds them
exchange = {exchange}     # every site's 'exchange' is the same"""

BY_FLARE = """\
carrier = "flare"         # NVIDIA FLARE, over mutual TLS
host = {host}             # machine of its server, as the sites reach it
port = {port}"""

CARD = """\
# What others need to know of {name}. Anybody may see it.
# Whoever pins it compares the fingerprint by telephone.
name = {quoted}
role = {role}
fingerprint = {fingerprint}
"""
