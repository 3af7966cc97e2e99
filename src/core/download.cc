#include "core/download.h"

#include "core/device_memory.h"

namespace tandem {

Download::Download(const Exec& exec, void* memory, size_t bytes)
    : pinned_(exec.on_gpu() ? pin_host_memory(exec, memory, bytes) : nullptr) {}
Download::~Download() = default;
Download::Download(Download&&) noexcept = default;
Download& Download::operator=(Download&&) noexcept = default;

void Download::run(const Exec& exec, const Tensor& from, const Tensor& to) {
  if (!pinned_) return copy(exec, from, to);
  copy_bytes(exec, from.data(), to.data(), to.bytes());
  pinned_->record(exec);
}

void Download::wait() const {
  if (pinned_) pinned_->wait();
}

}  // namespace tandem
