# Tests with a PyTorch that has the fused operators, newer than Debian 12's: tools/setup_torch.sh fetches it.
set(fetched_torch ${PROJECT_SOURCE_DIR}/.deps/python-torch)
if(NOT EXISTS ${fetched_torch}/wanted)
  add_test(NAME python_torch COMMAND sh -c "echo 'skipped: no PyTorch 2.8 or newer: make test-torch fetches it'; exit 77")
  set_tests_properties(python_torch PROPERTIES SKIP_RETURN_CODE 77 LABELS torch)
  return()
endif()

# torch_test(NAME MODULES RANKS...): the list of test modules in one program on so many processes.
function(torch_test name modules)
  foreach(ranks ${ARGN})
    string(SHA1 hash ${name})
    string(SUBSTRING ${hash} 0 4 hash)
    math(EXPR port "20000 + 0x${hash} % 3000 * 4 + ${ranks}")
    add_test(NAME python_torch_${name}${ranks} WORKING_DIRECTORY ${tests}/torch
      COMMAND ${launch} ${ranks} ${TANDEM_PYTHON_EXECUTABLE} -B -m unittest ${modules})
    set_tests_properties(python_torch_${name}${ranks} PROPERTIES TIMEOUT 300 PROCESSORS 2 LABELS torch
      ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python:${fetched_torch};TANDEM_CACHE_DIR=${CMAKE_CURRENT_BINARY_DIR};\
TANDEM_DEADLINE_S=60;OMP_NUM_THREADS=1;MASTER_PORT=${port}")
  endforeach()
endfunction()

torch_test(enable "enable_test;scaled_test" 1 2 3)

# Frameworks, each on worlds that the test forks.
foreach(framework linears megatron titan vllm)
  add_test(NAME python_torch_${framework} WORKING_DIRECTORY ${tests}/frameworks
    COMMAND ${TANDEM_PYTHON_EXECUTABLE} -B -W ignore ${framework}_test.py)
  set_tests_properties(python_torch_${framework} PROPERTIES TIMEOUT 300 PROCESSORS 2 SKIP_RETURN_CODE 77 LABELS torch
    ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python:${fetched_torch};OMP_NUM_THREADS=1;TANDEM_TUNE=0;TANDEM_DEADLINE_S=60")
endforeach()
