#include "core/download.h"

#include "core/device_memory.h"

namespace tandem {

Download::Download(const Exec& exec, void* memory, size_t bytes)
    : pinned_(exec.on_gpu() ? pin_host_memory(exec, memory, bytes) : nullptr) {}
Download::~Download() = default;
Download::Download(Download&&) noexcept = default;
Download& Download::operator=(Download&&) noexcept = default;

void Download::begin(const Exec& exec) {
  if (pinned_) pinned_->begin(exec);
}

Tensor Download::fetch(const Exec& exec, const Tensor& from, const Tensor& to) {
  if (!exec.on_gpu()) return from;
  if (pinned_) {
    pinned_->copy(from.data(), to.data(), to.bytes());
  } else {
    copy(exec, from, to);
  }
  return to;
}

void Download::end() {
  if (pinned_) pinned_->end();
}

void Download::block(const Exec& exec) const {
  if (pinned_) pinned_->block(exec);
}

void Download::wait() const {
  if (pinned_) pinned_->wait();
}

void Download::wait_unchecked() const {
  if (pinned_) pinned_->wait_unchecked();
}

}  // namespace tandem
