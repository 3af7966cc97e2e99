# Read by ctest: commands of the tests without --device use CPU ranks on every machine. Tests of GPUs ask for them.
set(ENV{TANDEM_DEVICE} cpu)
