// Work that is enqueued again and again. On a GPU the driver calls of many small kernels take
// longer than the kernels: repeated work is captured in a CUDA graph and launched with one call.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "core/exec.h"

namespace tandem {

class CapturedWork;

class Replay {
 public:
  /// Everything in which calls differ; kernels get their deadline by value.
  using Key = std::array<int64_t, 5>;
  /// The least recently used graph is dropped for a further one.
  static constexpr size_t kMaxGraphs = 128;

  Replay();
  ~Replay();

  /// Enqueues the work of `enqueue` on exec's stream, the same of every call with a key: kernels
  /// and their operands' addresses, without a wait or a copy from or to pageable memory. The first
  /// such call is enqueued directly, the second is captured, and from then on the graph is
  /// launched. On a CPU, and on a stream that CUDA cannot capture, `enqueue` is called each time.
  void run(const Exec& exec, const Key& key, const std::function<void()>& enqueue);

 private:
  struct Entry {
    std::unique_ptr<CapturedWork> work;
    uint64_t used = 0;
  };
  void drop_oldest();

  std::map<Key, Entry> entries_;
  uint64_t uses_ = 0;
};

}  // namespace tandem
