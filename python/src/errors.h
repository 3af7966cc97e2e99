// C++ errors as Python's, and Python's signals inside C++ waits.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace tandem::python {

namespace nb = nanobind;

void bind_errors();
/// "numpy.ndarray"
std::string type_of(nb::handle object);

}  // namespace tandem::python
