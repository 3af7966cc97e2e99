#include "tests/overlap/failing_new.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace {
thread_local bool next_fails = false;
}

namespace tandem::test {

void fail_next_allocation() {
  next_fails = true;
}
bool allocation_will_fail() {
  return next_fails;
}

}  // namespace tandem::test

void* operator new(size_t bytes) {
  void* memory = std::exchange(next_fails, false) ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
