#include "overlap/gemm_rs/cpu.h"

#include <algorithm>

#include "collectives/partial_sums.h"
#include "observe/recorder.h"
#include "overlap/contract/encoded_candidates.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

namespace {
size_t whole_messages(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}
}  // namespace

GemmRsCpu::GemmRsCpu(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()),
      world_(comm.size()),
      desc_(desc),
      product_(desc),
      row_bytes_(size_t(desc.n) * size_of(desc.partial())),
      max_rows_(split(desc.m, comm.size(), 0).count),
      messages_(desc.wire, desc.partial(), desc.n),
      encoded_area_(max_bytes(messages_, world_,
                              [this](int chunks, int owner, int chunk) {
                                return rows_of(chunks, owner, chunk).count;
                              })),
      area_(std::max(whole_messages(size_t(max_rows_) * row_bytes_), encoded_area_)),
      partial_bytes_(whole_messages(size_t(desc.m) * row_bytes_)),
      workspace_(comm, "gemm_rs", size_t(world_) * area_,
                 world_ == 1 ? 0 : partial_bytes_ + size_t(world_) * encoded_area_,
                 world_ * kMaxChunks),
      decoded_(encoded_area_ ? size_t(world_) * size_t(max_rows_) * row_bytes_ : 0),
      partials_(size_t(world_)) {}

std::vector<Candidate> GemmRsCpu::candidates(const std::vector<int>& chunk_counts) {
  return uncompressed_and_encoded(desc_, [&](bool encoded) {
    return chunked_candidates(chunk_counts,
                              [this, encoded](Strategy form, int chunks, const Operands& operands) {
                                run(form, chunks, encoded, operands);
                              });
  });
}

Range GemmRsCpu::rows_of(int chunks, int owner, int chunk) const {
  return chunk_rows(desc_.m, world_, owner, chunks, chunk, Taper::rising);
}

size_t GemmRsCpu::messages_before(int chunks, int owner, int chunk) const {
  return bytes_before(messages_, chunk, [&](int i) { return rows_of(chunks, owner, i).count; });
}

void GemmRsCpu::send(int chunks, int owner, int chunk, bool encoded) {
  const Range rows = rows_of(chunks, owner, chunk);
  const int64_t in_shard = rows.begin - split(desc_.m, world_, owner).begin;
  const std::byte* from = workspace_.scratch() + size_t(rows.begin) * row_bytes_;
  size_t at = size_t(in_shard) * row_bytes_, bytes = size_t(rows.count) * row_bytes_;
  if (encoded) {
    const ScopedSpan span(SpanKind::compute, "gemm_rs", chunk_id(owner, chunks, chunk));
    const Tensor partial(workspace_.scratch(), desc_.partial(), {desc_.m, desc_.n});
    at = messages_before(chunks, owner, chunk);
    std::byte* messages =
        workspace_.scratch() + partial_bytes_ + size_t(owner) * encoded_area_ + at;
    bytes = messages_.encode(partial.rows(rows.begin, rows.count), messages);
    from = messages;
  }
  workspace_.put(owner, size_t(rank_) * area_ + at, from, bytes, signal(rank_, chunk));
}

void GemmRsCpu::reduce(int chunks, int chunk, bool encoded, const Operands& operands) {
  const Range rows = rows_of(chunks, rank_, chunk);
  const int64_t in_shard = rows.begin - split(desc_.m, world_, rank_).begin;
  for (int step = 0; step + 1 < world_; ++step) {
    const int source = rs_source(rank_, world_, step);
    workspace_.await(signal(source, chunk), source, chunk_id(rank_, chunks, chunk));
  }
  const ScopedSpan span(SpanKind::compute, "gemm_rs", chunk_id(rank_, chunks, chunk));
  for (int source = 0; source < world_; ++source) {
    const std::byte* area = workspace_.shared() + size_t(source) * area_;
    if (source == rank_) {
      partials_[size_t(source)] = workspace_.scratch() + size_t(rows.begin) * row_bytes_;
    } else if (encoded) {
      std::byte* decoded = decoded_.data() + size_t(source * max_rows_ + in_shard) * row_bytes_;
      messages_.decode(area + messages_before(chunks, rank_, chunk), rows.count, decoded);
      partials_[size_t(source)] = decoded;
    } else {
      partials_[size_t(source)] = area + size_t(in_shard) * row_bytes_;
    }
  }
  reduce_partials(partials_, desc_.partial(), operands.bias,
                  operands.out.rows(in_shard, rows.count));
}

void GemmRsCpu::run(Strategy form, int chunks, bool encoded, const Operands& operands) {
  const ScopedLabel label("gemm_rs", -1);
  product_.begin(operands);
  if (world_ == 1) return product_.run_local(0, desc_.m, operands.out, operands.bias);
  workspace_.begin();
  const Tensor partial(workspace_.scratch(), desc_.partial(), {desc_.m, desc_.n});
  if (form == Strategy::serial) product_.run_local(0, desc_.m, partial);
  for (int step = 0; step < world_; ++step) {
    const int owner = rs_owner(rank_, world_, step);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const Range rows = rows_of(chunks, owner, chunk);
      if (form == Strategy::overlapped) {
        const ScopedLabel tile("gemm_rs", chunk_id(owner, chunks, chunk));
        product_.run_local(rows.begin, rows.count, partial.rows(rows.begin, rows.count));
      }
      if (owner != rank_) {
        send(chunks, owner, chunk, encoded);
      } else {
        reduce(chunks, chunk, encoded, operands);
      }
    }
  }
}

}  // namespace tandem
