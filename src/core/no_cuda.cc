// Stub of GPU memory for a build without CUDA.
#include "core/device_memory.h"
#include "tandem/error.h"

namespace tandem {
namespace {

[[noreturn]] void refuse() {
  throw Unsupported("memory of a GPU: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace

std::shared_ptr<std::byte> allocate_on_gpu(size_t, Device) {
  refuse();
}

void copy_bytes(const Exec&, const void*, void*, size_t) {
  refuse();
}

std::unique_ptr<StreamEvent> make_stream_event() {
  refuse();
}

bool can_capture(const Exec&) {
  return false;
}

std::unique_ptr<CapturedWork> capture(const Exec&, const std::function<void()>&) {
  refuse();
}

std::unique_ptr<StagedBytes> make_staged_bytes(size_t) {
  refuse();
}

std::unique_ptr<PinnedRange> pin_host_memory(const Exec&, void*, size_t) {
  refuse();
}

void wait_for_stream(const Exec&) {
  refuse();
}

size_t used_memory(const Exec&) {
  refuse();
}

void clear_bytes(const Exec&, void*, size_t) {
  refuse();
}

}  // namespace tandem
