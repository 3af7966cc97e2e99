// Integer argument of any size, so that one that does not fit is an InvalidArgument that names it.
#pragma once

#include <fmt/format.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "tandem/error.h"

namespace tandem::python {

namespace nb = nanobind;

/// Result of Python's operator.index, which other objects than integers lack.
struct Integer {
  nb::object index;

  /// Throws InvalidArgument naming `op` and `name` unless it is `min` to `max`.
  template <typename T>
  T to(std::string_view op, std::string_view name, T min = std::numeric_limits<T>::min(),
       T max = std::numeric_limits<T>::max()) const {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow == 0 && value >= min && value <= max) return T(value);
    throw InvalidArgument(fmt::format("{}: {} {}: expected {} to {}", op, name,
                                      overflow > 0   ? "2^63 or more"
                                      : overflow < 0 ? "less than -2^63"
                                                     : fmt::format("{}", value),
                                      min, max));
  }
};

using Integers = std::vector<Integer>;
inline std::vector<int64_t> to_numbers(const Integers& integers, std::string_view op,
                                       std::string_view name) {
  std::vector<int64_t> numbers;
  for (const Integer& integer : integers) numbers.push_back(integer.to<int64_t>(op, name));
  return numbers;
}

}  // namespace tandem::python

namespace nanobind::detail {

template <>
struct type_caster<tandem::python::Integer> {
  NB_TYPE_CASTER(tandem::python::Integer, const_name("int"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    PyObject* const index = PyNumber_Index(source.ptr());
    if (!index) PyErr_Clear();
    value.index = steal(index);
    return index;
  }
};

}  // namespace nanobind::detail
