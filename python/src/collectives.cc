// Collectives as functions.
#include "collectives.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tandem/error.h"

namespace tandem::python {
namespace {

ReduceOp parse_op(const std::string& name) {
  if (name == "sum") return ReduceOp::sum;
  if (name == "max") return ReduceOp::max;
  throw InvalidArgument(fmt::format("op '{}': expected sum or max", name));
}

}  // namespace

SumKind::SumKind(const char* name, const std::string& op_name, nb::handle codec)
    : op(parse_op(op_name)), wire(wire_from(codec)) {
  if (wire.is_none() || op == ReduceOp::sum) return;
  throw InvalidArgument(
      fmt::format("{}: op '{}' with codec {}: expected sum", name, op_name, wire.describe()));
}

Feedback::Feedback(const char* name, const SumKind& kind, nb::handle residual) {
  if (residual.is_none()) return;
  if (kind.wire.is_none()) {
    throw InvalidArgument(fmt::format("{}: residual without a codec: expected none", name));
  }
  operand_.emplace(residual, name, "residual");
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape;
  for (int i = 0; i < tensor.dims(); ++i) shape.push_back(tensor.dim(i));
  return shape;
}

std::vector<Counts> exchange(Communicator& comm, const Counts& local, const char* what) {
  const auto blobs = comm.exchange(std::as_bytes(std::span(local)), what);
  std::vector<Counts> all;
  for (const auto& blob : blobs) {
    Counts& remote = all.emplace_back(blob.size() / sizeof(int64_t));
    std::memcpy(remote.data(), blob.data(), remote.size() * sizeof(int64_t));
  }
  return all;
}

Counts even_counts(int64_t rows, int size) {
  Counts counts;
  for (int r = 0; r < size; ++r) counts.push_back(shard_of(rows, size, r).count);
  return counts;
}

void check_counts(const Counts& counts, int size, const char* name) {
  if (int(counts.size()) != size) {
    throw InvalidArgument(fmt::format(
        "all_to_all: {}: {} counts: expected one for each of {} ranks", name, counts.size(), size));
  }
  sum_of(fmt::format("all_to_all: {}", name), counts);
}

int64_t sum_of(std::string_view what, const Counts& rows) {
  int64_t sum = 0;
  for (const int64_t count : rows) {
    if (count >= 0 && !__builtin_add_overflow(sum, count, &sum)) continue;
    throw InvalidArgument(
        fmt::format("{} [{}]: expected counts of at least 0 whose sum is below 2^63", what,
                    fmt::join(rows, ", ")));
  }
  return sum;
}

void run_all_reduce(Comm& comm, nb::handle x, const Tensor& data, const SumKind& kind,
                    const Tensor* residual) {
  comm.use("all_reduce", x, [&](Communicator& c) {
    if (kind.wire.is_none()) return all_reduce(c, data, kind.op);
    all_reduce(c, data, kind.wire, residual);
  });
}

void run_all_gather(Comm& comm, nb::handle x, const Tensor& shard, const Tensor& out,
                    const Wire& wire) {
  comm.use("all_gather", x, [&](Communicator& c) {
    if (wire.is_none()) return all_gather(c, shard, out);
    all_gather(c, shard, out, wire);
  });
}

void run_reduce_scatter(Comm& comm, nb::handle x, const Tensor& data, const Tensor& shard,
                        const SumKind& kind, const Tensor* residual) {
  comm.use("reduce_scatter", x, [&](Communicator& c) {
    if (kind.wire.is_none()) return reduce_scatter(c, data, shard, kind.op);
    reduce_scatter(c, data, shard, kind.wire, residual);
  });
}

void run_all_to_all(Comm& comm, nb::handle x, const Tensor& send, const Counts& send_counts,
                    const Tensor& recv, const Counts& recv_counts, const Wire& wire) {
  comm.use("all_to_all", x, [&](Communicator& c) {
    if (wire.is_none()) return all_to_all(c, send, send_counts, recv, recv_counts);
    all_to_all(c, send, send_counts, recv, recv_counts, wire);
  });
}

namespace {

void require_rows(const Tensor& tensor, const char* op, const char* name) {
  if (tensor.dims() > 0) return;
  throw InvalidArgument(fmt::format("{}: {}: no dimensions: expected rows", op, name));
}

nb::object reduce_all(Comm& comm, nb::object x, const std::string& op_name, nb::handle codec,
                      nb::object residual) {
  constexpr const char* kOp = "all_reduce";
  const SumKind kind(kOp, op_name, codec);
  const Feedback feedback(kOp, kind, residual);
  comm.open(kOp);
  const Operand data(x, kOp, "x");
  run_all_reduce(comm, x, data.tensor(), kind, feedback.tensor());
  return written(x, x);
}

nb::object gather_all(Comm& comm, nb::object x, nb::object out, nb::handle codec) {
  constexpr const char* kOp = "all_gather";
  const Wire wire = wire_from(codec);
  comm.open(kOp);
  const Operand shard(x, kOp, "x");
  require_rows(shard.tensor(), kOp, "x");
  const bool fresh = out.is_none();
  if (fresh) {
    auto shape = shape_of(shard.tensor());
    const auto rows = comm.use(
        kOp, [&](Communicator& c) { return exchange(c, {shape[0]}, "rows of all_gather"); });
    Counts of_ranks;
    for (const Counts& each : rows) of_ranks.push_back(each[0]);
    shape[0] = sum_of("all_gather: rows of the ranks", of_ranks);
    out = new_result(x, shape, kOp);
  }
  const Operand all(out, kOp, "out");
  run_all_gather(comm, x, shard.tensor(), all.tensor(), wire);
  return written(x, std::move(out), fresh);
}

nb::object scatter_sum(Comm& comm, nb::object x, const std::string& op_name, nb::object out,
                       nb::handle codec, nb::object residual) {
  constexpr const char* kOp = "reduce_scatter";
  const SumKind kind(kOp, op_name, codec);
  const Feedback feedback(kOp, kind, residual);
  comm.open(kOp);
  const Operand data(x, kOp, "x");
  require_rows(data.tensor(), kOp, "x");
  const bool fresh = out.is_none();
  if (fresh) {
    auto shape = shape_of(data.tensor());
    shape[0] = shard_of(shape[0], comm.size(), comm.rank()).count;
    out = new_result(x, shape, kOp);
  }
  const Operand shard(out, kOp, "out");
  run_reduce_scatter(comm, x, data.tensor(), shard.tensor(), kind, feedback.tensor());
  return written(x, std::move(out), fresh);
}

nb::object exchange_rows(Comm& comm, nb::object x, const std::optional<Integers>& sent,
                         const std::optional<Integers>& received, nb::object out,
                         nb::handle codec) {
  constexpr const char* kOp = "all_to_all";
  const Wire wire = wire_from(codec);
  comm.open(kOp);
  std::optional<Counts> send_counts, recv_counts;
  if (sent) send_counts = to_numbers(*sent, kOp, "send_counts");
  if (received) {
    recv_counts = to_numbers(*received, kOp, "recv_counts");
    check_counts(*recv_counts, comm.size(), "recv_counts");
  }
  const Operand send(x, kOp, "x");
  require_rows(send.tensor(), kOp, "x");
  auto shape = shape_of(send.tensor());
  if (!send_counts) send_counts = even_counts(shape[0], comm.size());
  check_counts(*send_counts, comm.size(), "send_counts");
  if (!recv_counts) {
    const auto all = comm.use(
        kOp, [&](Communicator& c) { return exchange(c, *send_counts, "counts of all_to_all"); });
    recv_counts.emplace();
    for (const Counts& remote : all) recv_counts->push_back(remote[size_t(comm.rank())]);
    check_counts(*recv_counts, comm.size(), "recv_counts");
  }
  const bool fresh = out.is_none();
  if (fresh) {
    shape[0] = sum_of("all_to_all: recv_counts", *recv_counts);
    out = new_result(x, shape, kOp);
  }
  const Operand recv(out, kOp, "out");
  run_all_to_all(comm, x, send.tensor(), *send_counts, recv.tensor(), *recv_counts, wire);
  return written(x, std::move(out), fresh);
}

template <typename Call>
void with_memory(Comm& comm, nb::handle x, const char* op, const Call& call) {
  comm.open(op);
  const Operand data(x, op, "x");
  comm.use(op, x, [&](Communicator& c) { call(c, data.tensor()); });
}

}  // namespace

void bind_collectives(nb::module_& m) {
  m.def("_all_reduce", &reduce_all, nb::arg("comm"), nb::arg("x").none(), nb::arg("op"),
        nb::arg("codec") = nb::none(), nb::arg("residual") = nb::none());
  m.def("all_gather", &gather_all, nb::arg("comm"), nb::arg("x").none(),
        nb::arg("out") = nb::none(), nb::kw_only(), nb::arg("codec") = nb::none(),
        "All ranks' rows, by rank: x [rows, ...] with rows of shard_of(M, size, rank); returns\n"
        "[M, ...] of x's dtype: out, or new. Without out the ranks first tell each other their "
        "rows.\n"
        "codec: a wire format, such as 'int8' or 'int4:g32', for f32, bf16 or f16. Collective. "
        "Raises\n"
        "InvalidArgument, Mismatch, Timeout, Aborted.");
  m.def("reduce_scatter", &scatter_sum, nb::arg("comm"), nb::arg("x").none(), nb::arg("op") = "sum",
        nb::arg("out") = nb::none(), nb::kw_only(), nb::arg("codec") = nb::none(),
        nb::arg("residual") = nb::none(),
        "Rows shard_of(M, size, rank) of the sum (or 'max') over ranks of x [M, ...], f32, bf16, "
        "f16 or\n"
        "i32: out, or new. codec and residual: as of all_reduce. Collective. Raises "
        "InvalidArgument,\n"
        "Mismatch, Timeout, Aborted.");
  m.def("all_to_all", &exchange_rows, nb::arg("comm"), nb::arg("x").none(),
        nb::arg("send_counts") = nb::none(), nb::arg("recv_counts") = nb::none(),
        nb::arg("out") = nb::none(), nb::kw_only(), nb::arg("codec") = nb::none(),
        "Rows of x [rows, ...] by destination, send_counts[r] of them for rank r (None: shard_of "
        "its\n"
        "rows); returns [sum of recv_counts, ...], rows by source: out, or new. Without "
        "recv_counts the\n"
        "ranks first tell each other. codec: a wire format. Collective. Raises InvalidArgument,\n"
        "Mismatch, Timeout, Aborted.");
  m.def("_broadcast", [](Comm& comm, nb::object x, const Integer& root_rank) {
    const int root = root_rank.to<int>("broadcast", "root");
    with_memory(comm, x, "broadcast",
                [&](Communicator& c, const Tensor& data) { broadcast(c, data, root); });
    return written(x, x);
  });
  m.def(
      "send",
      [](Comm& comm, nb::object x, const Integer& peer_rank) {
        const int peer = peer_rank.to<int>("send", "peer");
        with_memory(comm, x, "send",
                    [&](Communicator& c, const Tensor& data) { send(c, data, peer); });
      },
      nb::arg("comm"), nb::arg("x").none(), nb::arg("peer"),
      "x, of any shape and dtype, to `peer`, which calls recv with as many bytes. Matched in "
      "order;\n"
      "returns once x may be written again. Not collective. Raises InvalidArgument, Timeout, "
      "Aborted.");
  m.def(
      "recv",
      [](Comm& comm, nb::object x, const Integer& peer_rank) {
        const int peer = peer_rank.to<int>("recv", "peer");
        with_memory(comm, x, "recv",
                    [&](Communicator& c, const Tensor& data) { recv(c, data, peer); });
        return written(x, x);
      },
      nb::arg("comm"), nb::arg("x").none(), nb::arg("peer"),
      "Into x, contiguous, from `peer`, which calls send; returns x. Not collective. Raises\n"
      "InvalidArgument, Timeout, Aborted.");
  m.def(
      "shard_of",
      [](const Integer& total_rows, const Integer& world_size, const Integer& of_rank) {
        const auto total = total_rows.to<int64_t>("shard_of", "total");
        const auto world = world_size.to<int>("shard_of", "world");
        const auto rank = of_rank.to<int>("shard_of", "rank");
        if (total < 0 || world < 1 || rank < 0 || rank >= world) {
          throw InvalidArgument(
              fmt::format("shard_of: total {}, world {}, rank {}: expected a rank of the world",
                          total, world, rank));
        }
        const Shard shard = shard_of(total, world, rank);
        return nb::make_tuple(shard.begin, shard.count);
      },
      nb::arg("total"), nb::arg("world"), nb::arg("rank"),
      "(begin, count): the shard of `total` rows that `rank` of `world` holds.");
}

}  // namespace tandem::python
