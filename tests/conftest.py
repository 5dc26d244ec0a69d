"""What holds for every test and for every process that it starts."""

import os

# torch asks for the name of each address that it connects to, and of 127.0.0.1 as IPv6 writes it only a name server can
# tell. Where one loses a question, five seconds are waited for the answer, in each of thousands of process groups.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
