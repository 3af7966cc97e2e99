#include "kernels/attention/simple_attention.h"

#include <fmt/format.h>

#include <mutex>
#include <set>

#include "core/system/log.h"

namespace tandem {
namespace {

constexpr int64_t kVector = 8;  // bf16 elements of 16 bytes
constexpr int64_t kMaxHead = 128;

}  // namespace

std::string why_simple_attention(const AttentionShape& shape, const AttentionRows& rows,
                                 const AttentionHost& host) {
  if (rows.dtype != DType::bf16) {
    return fmt::format("{}: fused kernels take bf16", name_of(rows.dtype));
  }
  if (host.is_portable) return "TANDEM_GPU_PORTABLE is 1";
  // Ranks that share a GPU may not load code while others' kernels wait for them.
  if (host.shares_gpu) return "ranks share the GPU";
  if (shape.head_dim % kVector != 0 || shape.head_dim > kMaxHead) {
    return fmt::format("head_dim {}: fused kernels take multiples of {} up to {}", shape.head_dim,
                       kVector, kMaxHead);
  }
  if (rows.qkv_stride % kVector != 0 || rows.out_stride % kVector != 0) {
    return fmt::format("rows of {} and {} elements: fused kernels take multiples of {}",
                       rows.qkv_stride, rows.out_stride, kVector);
  }
  return "";
}

void note_simple_attention(const std::string& reason) {
  static std::mutex mutex;
  static std::set<std::string> logged;
  const std::lock_guard lock(mutex);
  if (!logged.insert(reason).second) return;
  log_message(LogLevel::warn, "attention on GPUs: simple kernels: " + reason);
}

}  // namespace tandem
