// Collectives as objects, created once for a shape and dtype, which all ranks then agree on.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives.h"
#include "tandem/error.h"

namespace tandem::python {
namespace {

using Shape = std::vector<int64_t>;

constexpr int64_t kMaxRows = int64_t{1} << 48;

class Collective {
 public:
  const Shape& shape() const { return shape_; }
  const Shape& result_shape() const { return result_shape_; }
  DType dtype() const { return dtype_; }
  std::shared_ptr<Comm> comm() const { return comm_; }
  std::string describe() const {
    return fmt::format("<tandem.{} {} to [{}]{}>", type_, described(shape_),
                       fmt::join(result_shape_, ", "), comm_->closed() ? ", closed" : "");
  }

 protected:
  /// `name`: name in error messages; `rows`: true if x must have a first dimension.
  Collective(const char* type, const char* name, std::shared_ptr<Comm> comm, const Integers& shape,
             nb::handle dtype, bool rows)
      : type_(type),
        name_(name),
        comm_(std::move(comm)),
        shape_(to_numbers(shape, name, "shape")),
        result_shape_(shape_),
        dtype_(dtype_from(dtype)) {
    comm_->open(name_);
    comm_->refuse_capture(name_);
    bool possible = (!rows || !shape_.empty()) && shape_.size() <= size_t(kMaxDims);
    int64_t bytes = int64_t(size_of(dtype_));
    for (const int64_t extent : shape_) {
      possible = possible && extent >= 0 && extent <= kMaxRows &&
                 !__builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes);
    }
    if (!possible) {
      throw InvalidArgument(fmt::format(
          "{}: shape [{}]: expected {} to {} dimensions of 0 to 2^48, of less than 2^63 bytes",
          name_, fmt::join(shape_, ", "), rows ? 1 : 0, kMaxDims));
    }
  }
  Collective(const Collective&) = delete;
  ~Collective() = default;

  /// Collective: checks that the shape, dtype and `options` are equal on all ranks. Without `rows`
  /// the first dimension may differ.
  void agree(const std::string& options, bool rows) const {
    Shape same = shape_;
    if (!rows) same.erase(same.begin());
    const auto text = fmt::format("{}[{}{}]{}", name_of(dtype_), rows ? "" : "rows, ",
                                  fmt::join(same, ", "), options);
    comm_->use(name_, [&](Communicator& c) { c.require_same(name_, text); });
  }
  void require(const Operand& operand, const char* name, const Shape& shape) const {
    const Tensor& tensor = operand.tensor();
    bool same = tensor.dtype() == dtype_ && tensor.dims() == int(shape.size());
    for (int i = 0; same && i < tensor.dims(); ++i) same = tensor.dim(i) == shape[size_t(i)];
    if (same) return;
    throw InvalidArgument(
        fmt::format("{}: {}: {}: expected {}", name_, name, tensor.describe(), described(shape)));
  }
  /// Calls `run(x's framework, x, out)` on validated memory; allocates out if none is given.
  template <typename Run>
  nb::object result(nb::object x, nb::object out, const Run& run) const {
    comm_->open(name_);
    const Operand from(x, name_, "x");
    require(from, "x", shape_);
    const bool fresh = out.is_none();
    if (fresh) out = new_result(x, result_shape_, name_);
    {
      const Operand to(out, name_, "out");
      if (!fresh) require(to, "out", result_shape_);
      run(x, from.tensor(), to.tensor());
    }
    return written(x, std::move(out), fresh);
  }
  std::string described(const Shape& shape) const {
    return fmt::format("{}[{}]", name_of(dtype_), fmt::join(shape, ", "));
  }

  const char* const type_;
  const char* const name_;
  const std::shared_ptr<Comm> comm_;
  const Shape shape_;
  Shape result_shape_;
  const DType dtype_;
};

std::string options_of(const SumKind& kind) {
  return fmt::format(" {} {}", kind.op == ReduceOp::sum ? "sum" : "max", kind.wire.describe());
}

class AllReduce : public Collective {
 public:
  AllReduce(std::shared_ptr<Comm> comm, const Integers& shape, nb::handle dtype,
            const std::string& op, nb::handle codec)
      : Collective("AllReduce", "all_reduce", std::move(comm), shape, dtype, false),
        kind_(name_, op, codec) {
    agree(options_of(kind_), true);
  }
  nb::object call(nb::object x, nb::object residual) const {
    const Feedback feedback(name_, kind_, residual);
    comm_->open(name_);
    nb::object to = writable(x);
    {
      const Operand data(to, name_, "x");
      require(data, "x", shape_);
      run_all_reduce(*comm_, to, data.tensor(), kind_, feedback.tensor());
    }
    const bool is_copy = !to.is(x);
    return written(x, std::move(to), is_copy);
  }

 private:
  const SumKind kind_;
};

class AllGather : public Collective {
 public:
  AllGather(std::shared_ptr<Comm> comm, const Integers& shape, nb::handle dtype, nb::handle codec)
      : Collective("AllGather", "all_gather", std::move(comm), shape, dtype, true),
        wire_(wire_from(codec)) {
    agree(fmt::format(" {}", wire_.describe()), false);
    const auto rows = comm_->use(
        name_, [&](Communicator& c) { return exchange(c, {shape_[0]}, "rows of all_gather"); });
    Counts of_ranks;
    for (const Counts& each : rows) of_ranks.push_back(each[0]);
    const int64_t all = sum_of("all_gather: rows of the ranks", of_ranks);
    for (int r = 0; r < comm_->size(); ++r) {
      const int64_t expected = shard_of(all, comm_->size(), r).count;
      if (rows[size_t(r)][0] == expected) continue;
      throw Mismatch(fmt::format("{}: rank {} has {} rows of {}: expected {}", name_, r,
                                 rows[size_t(r)][0], all, expected));
    }
    result_shape_[0] = all;
  }
  nb::object call(nb::object x, nb::object out) const {
    return result(std::move(x), std::move(out),
                  [&](nb::handle like, const Tensor& shard, const Tensor& all) {
                    run_all_gather(*comm_, like, shard, all, wire_);
                  });
  }

 private:
  const Wire wire_;
};

class ReduceScatter : public Collective {
 public:
  ReduceScatter(std::shared_ptr<Comm> comm, const Integers& shape, nb::handle dtype,
                const std::string& op, nb::handle codec)
      : Collective("ReduceScatter", "reduce_scatter", std::move(comm), shape, dtype, true),
        kind_(name_, op, codec) {
    agree(options_of(kind_), true);
    result_shape_[0] = shard_of(shape_[0], comm_->size(), comm_->rank()).count;
  }
  nb::object call(nb::object x, nb::object out, nb::object residual) const {
    const Feedback feedback(name_, kind_, residual);
    return result(std::move(x), std::move(out),
                  [&](nb::handle like, const Tensor& data, const Tensor& shard) {
                    run_reduce_scatter(*comm_, like, data, shard, kind_, feedback.tensor());
                  });
  }

 private:
  const SumKind kind_;
};

class AllToAll : public Collective {
 public:
  AllToAll(std::shared_ptr<Comm> comm, const Integers& shape, nb::handle dtype,
           const std::optional<Integers>& send_counts, nb::handle codec)
      : Collective("AllToAll", "all_to_all", std::move(comm), shape, dtype, true),
        wire_(wire_from(codec)) {
    const int size = comm_->size();
    send_counts_ =
        send_counts ? to_numbers(*send_counts, name_, "send_counts") : even_counts(shape_[0], size);
    check_counts(send_counts_, size, "send_counts");
    check_rows();
    agree(fmt::format(" {}", wire_.describe()), false);
    const auto all = comm_->use(
        name_, [&](Communicator& c) { return exchange(c, send_counts_, "counts of all_to_all"); });
    for (const Counts& remote : all) recv_counts_.push_back(remote[size_t(comm_->rank())]);
    result_shape_[0] = sum_of("all_to_all: recv_counts", recv_counts_);
  }
  const Counts& recv_counts() const { return recv_counts_; }
  nb::object call(nb::object x, nb::object out) const {
    return result(std::move(x), std::move(out),
                  [&](nb::handle like, const Tensor& send, const Tensor& recv) {
                    run_all_to_all(*comm_, like, send, send_counts_, recv, recv_counts_, wire_);
                  });
  }

 private:
  void check_rows() const {
    int64_t left = shape_[0];
    for (const int64_t count : send_counts_) {
      if (count < 0 || count > left) left = -1;
      if (left < 0) break;
      left -= count;
    }
    if (left == 0) return;
    throw InvalidArgument(fmt::format("{}: send_counts [{}]: expected rows that sum to {}", name_,
                                      fmt::join(send_counts_, ", "), shape_[0]));
  }

  const Wire wire_;
  Counts send_counts_, recv_counts_;
};

template <typename Object>
nb::class_<Object> bind_common(nb::module_& m, const char* name, const char* doc) {
  return nb::class_<Object>(m, name, doc)
      .def_prop_ro("comm", &Object::comm)
      .def_prop_ro(
          "shape", [](const Object& o) { return nb::tuple(nb::cast(o.shape())); }, "Of x.")
      .def_prop_ro("result_shape",
                   [](const Object& o) { return nb::tuple(nb::cast(o.result_shape())); })
      .def_prop_ro("dtype", &Object::dtype)
      .def("__deepcopy__", [](nb::object self, nb::handle) { return self; })
      .def("__repr__", &Object::describe);
}

}  // namespace

void bind_collective_objects(nb::module_& m) {
  bind_common<AllReduce>(m, "AllReduce",
                         "all_reduce of x [shape], f32, bf16, f16 or i32, made once. op: 'sum' or "
                         "'max'; codec: as of\n"
                         "all_reduce. Collective to construct and to call. Raises InvalidArgument, "
                         "Mismatch, Timeout,\n"
                         "Aborted.")
      .def(nb::init<std::shared_ptr<Comm>, Integers, nb::handle, const std::string&, nb::handle>(),
           nb::arg("comm"), nb::arg("shape"), nb::arg("dtype") = "f32", nb::kw_only(),
           nb::arg("op") = "sum", nb::arg("codec") = nb::none())
      .def("__call__", &AllReduce::call, nb::arg("x").none(), nb::arg("residual") = nb::none(),
           "The sum or maximum, in x itself, which is returned; of JAX a new array. residual: as "
           "of\n"
           "all_reduce. Raises InvalidArgument, Timeout, Aborted.");
  bind_common<AllGather>(
      m, "AllGather",
      "all_gather of x [shape], rows of shard_of(M, size, rank), made once: calls do not tell "
      "each\n"
      "other their rows. codec: as of all_gather. Collective to construct and to call. Raises\n"
      "InvalidArgument, Mismatch, Timeout, Aborted.")
      .def(nb::init<std::shared_ptr<Comm>, Integers, nb::handle, nb::handle>(), nb::arg("comm"),
           nb::arg("shape"), nb::arg("dtype") = "f32", nb::kw_only(), nb::arg("codec") = nb::none())
      .def("__call__", &AllGather::call, nb::arg("x").none(), nb::arg("out") = nb::none(),
           "[M, ...]: out, or new. Raises InvalidArgument, Timeout, Aborted.");
  bind_common<ReduceScatter>(
      m, "ReduceScatter",
      "reduce_scatter of x [shape], made once. op: 'sum' or 'max'; codec: as of all_reduce. "
      "Collective\n"
      "to construct and to call. Raises InvalidArgument, Mismatch, Timeout, Aborted.")
      .def(nb::init<std::shared_ptr<Comm>, Integers, nb::handle, const std::string&, nb::handle>(),
           nb::arg("comm"), nb::arg("shape"), nb::arg("dtype") = "f32", nb::kw_only(),
           nb::arg("op") = "sum", nb::arg("codec") = nb::none())
      .def(
          "__call__", &ReduceScatter::call, nb::arg("x").none(), nb::arg("out") = nb::none(),
          nb::kw_only(), nb::arg("residual") = nb::none(),
          "Rows shard_of(M, size, rank) of the sum: out, or new. Raises InvalidArgument, Timeout,\n"
          "Aborted.");
  bind_common<AllToAll>(
      m, "AllToAll",
      "all_to_all of x [shape] with send_counts[r] rows for rank r (None: shard_of its rows), "
      "made\n"
      "once: calls do not tell each other their counts. codec: as of all_to_all. Collective to\n"
      "construct and to call. Raises InvalidArgument, Mismatch, Timeout, Aborted.")
      .def(nb::init<std::shared_ptr<Comm>, Integers, nb::handle, std::optional<Integers>,
                    nb::handle>(),
           nb::arg("comm"), nb::arg("shape"), nb::arg("dtype") = "f32",
           nb::arg("send_counts") = nb::none(), nb::kw_only(), nb::arg("codec") = nb::none())
      .def_prop_ro("recv_counts", &AllToAll::recv_counts, "Rows from each rank.")
      .def("__call__", &AllToAll::call, nb::arg("x").none(), nb::arg("out") = nb::none(),
           "[sum of recv_counts, ...], rows by source: out, or new. Raises InvalidArgument, "
           "Timeout,\n"
           "Aborted.");
}

}  // namespace tandem::python
