// Independent tasks that may throw, on this thread's kernel threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "core/cpu/parallel.h"

namespace tandem::cpu {

/// body(i) for i in [0, count), in this order, each by the next free thread. Throws the error of
/// the first i that has one, once all have ended.
template <typename Body>
void parallel_tasks(int64_t count, const Body& body) {
  if (count == 1) return body(int64_t{0});
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  std::atomic<int64_t> next = 0;
  parallel_ranges(count, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) {
      try {
        body(i);
      } catch (...) {
        errors[size_t(i)] = std::current_exception();
      }
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace tandem::cpu
