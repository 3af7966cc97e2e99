// Registry of a class's objects held by Python, to find one by its id(): operators of torch.compile
// take numbers, not objects.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <set>

namespace tandem::python {

namespace nb = nanobind;

/// Base class. All functions require the GIL.
template <typename T>
class Living {
 public:
  /// Python object at this address; None if there is no T.
  static nb::object at(uintptr_t address) {
    for (const T* const each : all()) {
      nb::object object = nb::find(each);
      if (object.is_valid() && reinterpret_cast<uintptr_t>(object.ptr()) == address) return object;
    }
    return nb::none();
  }

 protected:
  Living() { all().insert(static_cast<const T*>(this)); }
  Living(const Living&) = delete;
  Living& operator=(const Living&) = delete;
  ~Living() { all().erase(static_cast<const T*>(this)); }

 private:
  // Never destroyed: an object may live until the process ends.
  static std::set<const T*>& all() {
    static auto* const objects = new std::set<const T*>;
    return *objects;
  }
};

}  // namespace tandem::python
