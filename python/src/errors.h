// Conversion of C++ errors to Python exceptions, and Python signals inside C++ waits.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace tandem::python {

namespace nb = nanobind;

void bind_errors();
/// Converts to UTF-8; escapes code points that it cannot encode, such as lone surrogates.
std::string text_of(const nb::str& text);
/// Qualified type name, such as "numpy.ndarray".
std::string type_of(nb::handle object);

}  // namespace tandem::python
