#include "overlap/gemm_rs/cpu.h"

#include <algorithm>

#include "codec/whole.h"
#include "gemm/gemm.h"
#include "observe/recorder.h"
#include "overlap/reduce.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

namespace {

/// Room for an encoded row: so much that any number of rows has room for its message, where they
/// are one.
size_t message_bytes(const OpDesc& desc, int64_t most_rows) {
  if (desc.wire.is_none()) return 0;
  size_t bytes = desc.wire.bytes(desc.n, desc.dtype);
  if (!desc.wire.is_exact()) return bytes;
  for (int64_t rows = 2; rows <= most_rows; ++rows) {
    const size_t all = desc.wire.bytes(rows * desc.n, desc.dtype);
    bytes = std::max(bytes, (all + size_t(rows) - 1) / size_t(rows));
  }
  return (bytes + 15) / 16 * 16;
}

}  // namespace

GemmRsCpu::GemmRsCpu(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()),
      world_(comm.size()),
      desc_(desc),
      line_(size_t(desc.n) * size_of(desc.dtype)),
      most_rows_(split(desc.m, comm.size(), 0).count),
      message_(message_bytes(desc, most_rows_)),
      slot_(std::max(line_, message_)),
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
    candidate.lossy = !desc_.wire.is_exact();
    all.push_back(std::move(candidate));
  }
  return all;
}

void GemmRsCpu::send(int chunks, int owner, int chunk, bool encoded) {
  const Range rows = chunk_rows(desc_.m, world_, owner, chunks, chunk, Taper::rising);
  const int64_t in_shard = rows.begin - split(desc_.m, world_, owner).begin;
  const std::byte* partial = workspace_.scratch() + size_t(rows.begin) * line_;
  const size_t at = size_t(rank_ * most_rows_) * slot_, row = encoded ? message_ : line_;
  size_t bytes = size_t(rows.count) * row;
  if (encoded) {
    const ScopedSpan span(SpanKind::compute, "gemm_rs", chunk_id(owner, chunks, chunk));
    std::byte* messages =
        workspace_.scratch() + size_t(desc_.m) * line_ + size_t(rows.begin) * message_;
    bytes = encode_rows(partial, rows.count, messages);
    partial = messages;
  }
  workspace_.put(owner, at + size_t(in_shard) * row, partial, bytes, signal(rank_, chunk));
}

size_t GemmRsCpu::encode_rows(const std::byte* values, int64_t rows, std::byte* messages) const {
  if (rows == 0) return 0;
  if (desc_.wire.is_exact()) {
    return codec::encode_whole(desc_.wire, desc_.dtype, values, rows * desc_.n, messages);
  }
  for (int64_t i = 0; i < rows; ++i) {
    codec::encode_whole(desc_.wire, desc_.dtype, values + size_t(i) * line_, desc_.n,
                        messages + size_t(i) * message_);
  }
  return size_t(rows) * message_;
}

void GemmRsCpu::decode_rows(const std::byte* messages, int64_t rows, std::byte* to) const {
  if (rows == 0) return;
  if (desc_.wire.is_exact()) {
    codec::decode_whole(desc_.wire, {messages, size_t(rows) * message_}, desc_.dtype, to,
                        rows * desc_.n);
    return;
  }
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
