#include "core/host_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace tandem {
namespace {

/// Min size of memory in pages of its own.
constexpr size_t kMinPages = size_t(64) << 10;

}  // namespace

std::shared_ptr<std::byte> allocate_zeroed(size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  const size_t rounded = (bytes + 63) / 64 * 64 + 64;
  if (rounded < kMinPages) {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
    if (!memory) return nullptr;
    std::memset(memory, 0, rounded);
    return {memory, [](std::byte* p) { std::free(p); }};
  }
  void* pages =
      ::mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  return {static_cast<std::byte*>(pages), [rounded](std::byte* p) { ::munmap(p, rounded); }};
}

}  // namespace tandem
