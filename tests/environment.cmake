# Read by ctest: commands of the tests without --device use CPU ranks on every machine. Tests of GPUs ask for them.
set(ENV{TANDEM_DEVICE} cpu)
# Tests run beside each other: threads of OpenMP that spin for one without a processor take it from others.
if(NOT DEFINED ENV{OMP_WAIT_POLICY})
  set(ENV{OMP_WAIT_POLICY} passive)
endif()
