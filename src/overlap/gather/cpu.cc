#include "overlap/gather/cpu.h"

#include <algorithm>
#include <array>

#include "collectives/partial_sums.h"
#include "observe/recorder.h"

namespace tandem {

using namespace schedule;

ShardGather::ShardGather(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()),
      world_(comm.size()),
      m_(desc.m),
      k_(desc.k),
      dtype_(desc.dtype),
      is_exact_(desc.wire.is_exact()),
      messages_(desc.wire, desc.dtype, desc.k),
      area_(max_bytes(messages_, world_,
                      [this](int chunks, int owner, int chunk) {
                        return rows_of(chunks, owner, chunk).count;
                      })),
      workspace_(comm, desc.op,
                 std::max(desc.wire.is_none() || desc.allow_uncompressed || world_ == 1
                              ? size_t(desc.m * desc.k) * size_of(desc.dtype)
                              : 0,
                          size_t(world_) * area_),
                 0, world_ * kMaxChunks),
      decoded_(desc.wire.is_none() ? 0 : size_t(desc.m * desc.k) * size_of(desc.dtype)) {}

Range ShardGather::rows_of(int chunks, int owner, int chunk) const {
  return chunk_rows(m_, world_, owner, chunks, chunk, Taper::falling);
}

size_t ShardGather::messages_at(int chunks, int owner, int chunk) const {
  return size_t(owner) * area_ +
         bytes_before(messages_, chunk, [&](int i) { return rows_of(chunks, owner, i).count; });
}

Tensor ShardGather::all() const {
  return Tensor(encoded_ ? decoded_.data() : workspace_.shared(), dtype_, {m_, k_});
}

void ShardGather::begin(int chunks, const Tensor& x, bool keep, bool encoded) {
  workspace_.begin();
  encoded_ = encoded;
  encoded ? send_encoded(chunks, x) : send(chunks, x, keep);
}

void ShardGather::send(int chunks, const Tensor& x, bool keep) {
  const Range local = split(m_, world_, rank_);
  local_ = x;
  flush_ = true;
  if (keep || !x.contiguous()) {
    const ScopedSpan span(SpanKind::compute, "gather_local");
    local_ = all().rows(local.begin, local.count);
    copy_rows(x, static_cast<std::byte*>(local_.data()));
    flush_ = false;  // sent from the workspace: `end` needs no flush
  }
  const size_t row_bytes = size_t(k_) * size_of(dtype_);
  for (int step = 1; step < world_; ++step) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const Range rows = rows_of(chunks, rank_, chunk);
      const auto* source = static_cast<const std::byte*>(local_.data()) +
                           size_t(rows.begin - local.begin) * row_bytes;
      workspace_.put(ag_target(rank_, world_, step), size_t(rows.begin) * row_bytes, source,
                     size_t(rows.count) * row_bytes, signal(rank_, chunk));
    }
  }
}

void ShardGather::send_encoded(int chunks, const Tensor& x) {
  const Range local = split(m_, world_, rank_);
  local_ = all().rows(local.begin, local.count);
  flush_ = false;  // sent from the workspace
  if (is_exact_) copy_rows(x, local_.as<std::byte>());
  std::array<size_t, kMaxChunks> bytes;
  const auto put = [&](int step, int chunk) {
    const size_t at = messages_at(chunks, rank_, chunk);
    workspace_.put(ag_target(rank_, world_, step), at, workspace_.shared() + at,
                   bytes[size_t(chunk)], signal(rank_, chunk));
  };
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const Range rows = rows_of(chunks, rank_, chunk);
    const int64_t in_shard = rows.begin - local.begin;
    std::byte* messages = workspace_.shared() + messages_at(chunks, rank_, chunk);
    {
      const ScopedSpan span(SpanKind::compute, "encode_local", chunk);
      bytes[size_t(chunk)] =
          messages_.encode((is_exact_ ? local_ : x).rows(in_shard, rows.count), messages);
    }
    put(1, chunk);
    if (is_exact_) continue;
    const ScopedSpan span(SpanKind::compute, "decode_local", chunk);
    messages_.decode(messages, rows.count, local_.rows(in_shard, rows.count).as<std::byte>());
  }
  for (int step = 2; step < world_; ++step) {
    for (int chunk = 0; chunk < chunks; ++chunk) put(step, chunk);
  }
}

void ShardGather::await(int chunks, int owner, int chunk) {
  const int id = chunk_id(owner, chunks, chunk);
  workspace_.await(signal(owner, chunk), owner, id);
  if (!encoded_) return;
  const ScopedSpan span(SpanKind::compute, "decode", id, owner);
  const Range rows = rows_of(chunks, owner, chunk);
  messages_.decode(workspace_.shared() + messages_at(chunks, owner, chunk), rows.count,
                   all().rows(rows.begin, rows.count).as<std::byte>());
}

void ShardGather::end() {
  if (flush_ && world_ > 1) workspace_.flush();
}

}  // namespace tandem
