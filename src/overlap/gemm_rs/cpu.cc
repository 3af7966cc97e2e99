#include "overlap/gemm_rs/cpu.h"

#include <algorithm>

#include "codec/whole.h"
#include "gemm/gemm.h"
#include "observe/recorder.h"
#include "overlap/reduce.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

GemmRsCpu::GemmRsCpu(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()),
      world_(comm.size()),
      desc_(desc),
      line_(size_t(desc.n) * size_of(desc.dtype)),
      message_(desc.wire.is_none() ? 0 : desc.wire.bytes(desc.n, desc.dtype)),
      slot_(std::max(line_, message_)),
      most_rows_(split(desc.m, comm.size(), 0).count),
      workspace_(comm, "gemm_rs", size_t(world_) * size_t(most_rows_) * slot_,
                 world_ == 1 ? 0 : size_t(desc.m) * (line_ + message_), world_ * kMaxChunks),
      decoded_(message_ ? size_t(world_) * size_t(most_rows_) * line_ : 0),
      parts_(size_t(world_)) {}

std::vector<Candidate> GemmRsCpu::candidates(const std::vector<int>& chunk_counts) {
  const auto made = [&](bool encoded) {
    return chunked_candidates(chunk_counts,
                              [this, encoded](Form form, int chunks, const Operands& operands) {
                                run(form, chunks, encoded, operands);
                              });
  };
  if (desc_.wire.is_none()) return made(false);
  std::vector<Candidate> all = desc_.or_plain ? made(false) : std::vector<Candidate>{};
  for (Candidate& candidate : made(true)) {
    candidate.name += " as " + desc_.wire.describe();
    candidate.lossy = true;
    all.push_back(std::move(candidate));
  }
  return all;
}

void GemmRsCpu::send(int chunks, int owner, int chunk, bool encoded) {
  const Range rows = chunk_rows(desc_.m, world_, owner, chunks, chunk, Taper::rising);
  const int64_t in_shard = rows.begin - split(desc_.m, world_, owner).begin;
  const std::byte* partial = workspace_.scratch() + size_t(rows.begin) * line_;
  const size_t at = size_t(rank_ * most_rows_) * slot_, row = encoded ? message_ : line_;
  if (encoded) {
    const ScopedSpan span(SpanKind::compute, "gemm_rs", chunk_id(owner, chunks, chunk));
    std::byte* messages =
        workspace_.scratch() + size_t(desc_.m) * line_ + size_t(rows.begin) * message_;
    for (int64_t i = 0; i < rows.count; ++i) {
      codec::encode_whole(desc_.wire, desc_.dtype, partial + size_t(i) * line_, desc_.n,
                          messages + size_t(i) * message_);
    }
    partial = messages;
  }
  workspace_.put(owner, at + size_t(in_shard) * row, partial, size_t(rows.count) * row,
                 signal(rank_, chunk));
}

void GemmRsCpu::decode_rows(const std::byte* messages, int64_t rows, std::byte* to) const {
  for (int64_t i = 0; i < rows; ++i) {
    codec::decode_whole(desc_.wire, {messages + size_t(i) * message_, message_}, desc_.dtype,
                        to + size_t(i) * line_, desc_.n);
  }
}

void GemmRsCpu::reduce(int chunks, int chunk, bool encoded, const Operands& operands) {
  const Range rows = chunk_rows(desc_.m, world_, rank_, chunks, chunk, Taper::rising);
  const int64_t in_shard = rows.begin - split(desc_.m, world_, rank_).begin;
  for (int step = 0; step + 1 < world_; ++step) {
    const int source = rs_source(rank_, world_, step);
    workspace_.await(signal(source, chunk), source, chunk_id(rank_, chunks, chunk));
  }
  const ScopedSpan span(SpanKind::compute, "gemm_rs", chunk_id(rank_, chunks, chunk));
  for (int source = 0; source < world_; ++source) {
    std::byte* arrived = workspace_.shared() + size_t(source * most_rows_) * slot_ +
                         size_t(in_shard) * (encoded ? message_ : line_);
    if (source == rank_) {
      arrived = workspace_.scratch() + size_t(rows.begin) * line_;
    } else if (encoded) {
      std::byte* decoded = decoded_.data() + size_t(source * most_rows_ + in_shard) * line_;
      decode_rows(arrived, rows.count, decoded);
      arrived = decoded;
    }
    parts_[size_t(source)] = arrived;
  }
  reduce_partials(parts_, desc_.dtype, operands.bias, operands.out.rows(in_shard, rows.count));
}

void GemmRsCpu::run(Form form, int chunks, bool encoded, const Operands& operands) {
  const Tensor &x = operands.x, b = operands.weight.transposed();
  const ScopedLabel label("gemm_rs", -1);
  if (world_ == 1) return gemm(x, b, operands.out, {operands.bias, false});
  workspace_.begin();
  const Tensor partial(workspace_.scratch(), desc_.dtype, {desc_.m, desc_.n});
  if (form == Form::serial) gemm(x, b, partial);
  for (int step = 0; step < world_; ++step) {
    const int owner = rs_owner(rank_, world_, step);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const Range rows = chunk_rows(desc_.m, world_, owner, chunks, chunk, Taper::rising);
      if (form == Form::overlapped) {
        const ScopedLabel tile("gemm_rs", chunk_id(owner, chunks, chunk));
        gemm(x.rows(rows.begin, rows.count), b, partial.rows(rows.begin, rows.count));
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
