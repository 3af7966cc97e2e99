// Allocation failure with the requested size.
#pragma once

#include <cstddef>
#include <new>
#include <string>

namespace tandem {

/// Still a std::bad_alloc, so handlers of that catch it.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : what_(std::to_string(bytes) + " bytes") {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

}  // namespace tandem
