// What could not be allocated.
#pragma once

#include <cstddef>
#include <new>
#include <string>

namespace tandem {

/// Says how much was asked for, and stays what who handles memory's end catches.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : what_(std::to_string(bytes) + " bytes") {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

}  // namespace tandem
