// C++ errors as Python's, and Python's signals inside C++ waits.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace tandem::python {

namespace nb = nanobind;

void bind_errors();
/// In UTF-8; what has no form there, as a lone surrogate, is escaped.
std::string text_of(const nb::str& text);
/// "numpy.ndarray"
std::string type_of(nb::handle object);

}  // namespace tandem::python
