#include "collectives/split_all_reduce.h"

#include <algorithm>

#include "collectives/partial_sums.h"
#include "observe/recorder.h"
#include "schedule/ring.h"

namespace tandem {

using schedule::rs_owner;

namespace {

std::vector<Wire> with_none(const std::vector<Wire>& wires) {
  std::vector<Wire> all{Wire{}};
  for (const Wire& wire : wires) {
    if (std::ranges::find(all, wire) == all.end()) all.push_back(wire);
  }
  return all;
}

std::vector<RowMessages> messages_of(const std::vector<Wire>& wires, DType dtype, int64_t columns) {
  std::vector<RowMessages> all;
  for (const Wire& wire : wires) all.emplace_back(wire, dtype, columns);
  return all;
}

/// Rows of a transfer from one rank to another.
int64_t transfer_rows(int64_t max_rows, int world) {
  return world == 2 ? max_rows : shard_of(max_rows, world, 0).count;
}

}  // namespace

RowSums::RowSums(Communicator& comm, DType dtype, int64_t max_rows, int64_t columns,
                 const std::vector<Wire>& wires)
    : rank_(comm.rank()),
      world_(comm.size()),
      dtype_(dtype),
      columns_(columns),
      row_bytes_(size_t(columns) * size_of(dtype)),
      wires_(with_none(wires)),
      messages_(messages_of(wires_, dtype, columns)),
      area_(room(transfer_rows(max_rows, world_))),
      encoded_at_(room(max_rows)),
      workspace_(comm, "prefill", world_ == 1 ? 64 : 2 * size_t(world_) * area_,
                 encoded_at_ + size_t(world_) * area_, 2 * world_),
      decoded_(world_ == 1 ? 0 : size_t(world_) * area_),
      sums_(area_),
      partials_(size_t(world_)) {}

size_t RowSums::room(int64_t rows) const {
  size_t bytes = (size_t(rows) * row_bytes_ + 63) / 64 * 64;
  for (const RowMessages& each : messages_) bytes = std::max(bytes, each.bytes(rows));
  return (bytes + 63) / 64 * 64;
}

Tensor RowSums::partial(const Shard& rows) const {
  return Tensor(workspace_.scratch() + size_t(rows.begin) * row_bytes_, dtype_,
                {rows.count, columns_});
}

Tensor RowSums::begin(int64_t rows) {
  workspace_.begin();
  rows_ = rows;
  is_summed_ = false;
  return partial({0, rows});
}

const std::byte* RowSums::packed(const Tensor& rows, std::byte* to, size_t& bytes) const {
  bytes = size_t(rows.dim(0)) * row_bytes_;
  if (!is_encoded()) return rows.as<std::byte>();
  const ScopedSpan span(SpanKind::compute, "prefill");
  bytes = messages().encode(rows, to);
  return to;
}

const std::byte* RowSums::unpacked(const std::byte* message, int64_t rows, int source) {
  if (!is_encoded()) return message;
  std::byte* to = decoded_.data() + size_t(source) * area_;
  messages().decode(message, rows, to);
  return to;
}

void RowSums::send(const Wire& wire) {
  wire_ = size_t(std::ranges::find(wires_, wire) - wires_.begin());
  if (world_ == 1) return;
  // This rank's own encoded rows are stored in the slot of a message to itself.
  std::byte* const encoded = workspace_.scratch() + encoded_at_;
  size_t bytes = 0;
  if (is_one_shot()) {
    const std::byte* all = packed(partial({0, rows_}), encoded, bytes);
    workspace_.put(1 - rank_, size_t(rank_) * area_, all, bytes, partial_signal(rank_));
    partials_[size_t(rank_)] = is_lossy() ? all : partial({0, rows_}).as<std::byte>();
    return;
  }
  for (int step = 0; step < world_; ++step) {
    const int owner = rs_owner(rank_, world_, step);
    const Tensor rows = partial(share(owner));
    const bool is_local = owner == rank_;
    if (is_local && !is_lossy()) {
      partials_[size_t(rank_)] = rows.as<std::byte>();
      continue;
    }
    const std::byte* message = packed(rows, encoded + size_t(owner) * area_, bytes);
    if (is_local) {
      partials_[size_t(rank_)] = message;
    } else {
      workspace_.put(owner, size_t(rank_) * area_, message, bytes, partial_signal(rank_));
    }
  }
}

void RowSums::sum_arrived(const Shard& rows, const Tensor& out) {
  for (int source = 0; source < world_; ++source) {
    if (source != rank_) workspace_.await(partial_signal(source), source, 0);
  }
  const ScopedSpan span(SpanKind::compute, "prefill");
  for (int source = 0; source < world_; ++source) {
    const std::byte*& packed_partial = partials_[size_t(source)];
    if (source != rank_) {
      packed_partial = unpacked(workspace_.shared() + size_t(source) * area_, rows.count, source);
    } else if (is_lossy()) {
      packed_partial = unpacked(packed_partial, rows.count, source);
    }
  }
  reduce_partials(partials_, dtype_, nullptr, out);
}

void RowSums::sum_local() {
  is_summed_ = true;
  const Shard rows = share(rank_);
  const Tensor sums = sums_.view(dtype_, {rows.count, columns_});
  sum_arrived(rows, sums);
  const size_t at = size_t(world_ + rank_) * area_;
  size_t bytes = 0;
  const std::byte* message = packed(sums, workspace_.shared() + at, bytes);
  if (!is_encoded()) {  // keeps the source unchanged during the transfer
    copy_rows(sums, workspace_.shared() + at);
    message = workspace_.shared() + at;
  }
  for (int step = 0; step + 1 < world_; ++step) {
    workspace_.put(rs_owner(rank_, world_, step), at, message, bytes, sum_signal(rank_));
  }
}

void RowSums::advance() {
  if (world_ <= 2 || is_summed_ || rows_ == 0) return;
  for (int source = 0; source < world_; ++source) {
    if (source != rank_ && !workspace_.has(partial_signal(source))) return;
  }
  sum_local();
}

void RowSums::finish(const Tensor& out) {
  if (world_ == 1) {
    copy_rows(workspace_.scratch(), out);
  } else if (is_one_shot()) {
    sum_arrived({0, rows_}, out);
  } else {
    if (!is_summed_) sum_local();
    for (int owner = 0; owner < world_; ++owner) {
      const Shard rows = share(owner);
      if (owner != rank_) workspace_.await(sum_signal(owner), owner, 0);
      const std::byte* message = workspace_.shared() + size_t(world_ + owner) * area_;
      const std::byte* sums =
          owner == rank_ && !is_lossy() ? sums_.data() : unpacked(message, rows.count, owner);
      copy_rows(sums, out.rows(rows.begin, rows.count));
    }
  }
  rows_ = 0;
}

}  // namespace tandem
