#include "core/exec.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <cstring>

#include "core/device_memory.h"
#include "tandem/error.h"

namespace tandem {

namespace {

void check_copy(const Tensor& from, const Tensor& to) {
  if (from.dtype() != to.dtype() || from.elements() != to.elements() || !from.contiguous() ||
      !to.contiguous()) {
    throw InvalidArgument(fmt::format("copy {} to {}: expected contiguous tensors of one size",
                                      from.describe(), to.describe()));
  }
}

}  // namespace

void copy(const Exec& exec, const Tensor& from, const Tensor& to) {
  check_copy(from, to);
  if (from.elements() == 0) return;
  if (!exec.on_gpu()) {
    std::memcpy(to.data(), from.data(), from.bytes());
    return;
  }
  // A copy of pageable memory waits for the stream, and without a deadline: ours comes first.
  const bool is_to_or_from_host = from.device() != to.device();
  if (is_to_or_from_host) wait_for_stream(exec);
  copy_bytes(exec, from.data(), to.data(), from.bytes());
  if (is_to_or_from_host) wait_for_stream(exec);
}

Fence::Fence(const Exec& exec) : event_(exec.on_gpu() ? make_stream_event() : nullptr) {}
Fence::~Fence() = default;
Fence::Fence(Fence&&) noexcept = default;
Fence& Fence::operator=(Fence&&) noexcept = default;

void Fence::record(const Exec& exec) {
  if (event_) event_->record(exec);
}

void Fence::await(const Exec& exec) const {
  if (event_) event_->block(exec);
}

Upload::Upload(const Exec& exec, size_t max_bytes)
    : staged_(exec.on_gpu() ? make_staged_bytes(max_bytes) : nullptr) {}
Upload::~Upload() = default;
Upload::Upload(Upload&&) noexcept = default;
Upload& Upload::operator=(Upload&&) noexcept = default;

void Upload::run(const Exec& exec, const Tensor& from, const Tensor& to) {
  if (!staged_) return copy(exec, from, to);
  check_copy(from, to);
  staged_->copy(exec, from.data(), to.data(), from.bytes());
}

int64_t memory_in_use(const Exec& exec) {
  if (exec.on_gpu()) return int64_t(used_memory(exec));
  rusage usage{};
  return ::getrusage(RUSAGE_SELF, &usage) == 0 ? int64_t(usage.ru_maxrss) * 1024 : 0;
}

void wait(const Exec& exec) {
  if (exec.on_gpu()) wait_for_stream(exec);
}

void clear(const Exec& exec, const Tensor& tensor) {
  if (!tensor.contiguous()) {
    throw InvalidArgument(fmt::format("clear {}: expected it contiguous", tensor.describe()));
  }
  if (tensor.elements() == 0) return;
  if (exec.on_gpu()) return clear_bytes(exec, tensor.data(), tensor.bytes());
  std::memset(tensor.data(), 0, tensor.bytes());
}

}  // namespace tandem
