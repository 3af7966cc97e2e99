// Collectives that are encoded only if that is faster. A call's arguments include its chosen route,
// so ranks that request different things, some of them already measured, detect that like any other
// mismatch: no rank waits for one that measures.
#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/rows/routes.h"
#include "comm/workspace.h"
#include "core/random_buffer.h"
#include "overlap/collectives/gpu.h"
#include "tune/measure.h"
#include "tune/tuner.h"

namespace tandem {

using namespace collectives;

namespace {

const char* name_of(Route route) {
  switch (route) {
    case Route::uncompressed:
      return "uncompressed";
    case Route::one_shot:
      return "one shot";
    case Route::two_shots:
      return "two shots";
    case Route::given:
    case Route::choosing:
      break;
  }
  return "?";
}

/// Numbers to measure with. Those of an all-reduce grow with every call unless renewed.
class Scratch {
 public:
  /// `like`: sets the number of elements, dtype and shape.
  explicit Scratch(const Tensor& like)
      : values_(random_buffer(like.dtype() == DType::f32 ? DType::f32 : DType::bf16,
                              like.elements(), 1)),
        memory_(like.bytes()),
        dtype_(like.dtype()) {
    for (int i = 0; i < like.dims(); ++i) shape_.push_back(like.dim(i));
    renew();
  }
  void renew() {
    const Tensor to = tensor();
    if (to.bytes()) std::memcpy(to.data(), values_.data(), to.bytes());
  }
  Tensor tensor() const { return Tensor(memory_.data(), dtype_, std::span<const int64_t>(shape_)); }

 private:
  Memory values_, memory_;
  DType dtype_;
  std::vector<int64_t> shape_;
};

/// The route, measured if it is unknown: `seconds` runs one call.
Route route_for(Communicator& comm, Args args, const Wire& wire, int64_t elements,
                const std::vector<Route>& routes, const std::function<double(Route)>& seconds) {
  if (elements == 0) return Route::uncompressed;
  const std::string shape =
      fmt::format("2^{} {} as {} or uncompressed", std::bit_width(uint64_t(elements)) - 1,
                  tandem::name_of(args.dtype), wire.describe());
  const std::string key = fmt::format("{} {}", collectives::name_of(args.op), shape);
  auto& known = comm.workspace().routes;
  if (const auto found = known.find(key); found != known.end()) return Route(found->second);
  args.wire = wire;
  args.route = Route::choosing;
  {
    Call call(comm, args, {});
    call.enter_all({});
    call.check();
  }
  std::vector<std::string> names;
  for (const Route route : routes) names.emplace_back(name_of(route));
  const size_t fastest = tune(
      comm, collectives::name_of(args.op), shape, names,
      [&](size_t i) { return seconds(routes[i]); }, Bits::by_candidate);
  known[key] = uint8_t(routes[fastest]);
  return routes[fastest];
}

}  // namespace

void all_reduce(Communicator& comm, const Tensor& data, const AllowUncompressed& choice,
                const Tensor* residual) {
  const Wire& wire = choice.wire;
  if (wire.is_none()) return all_reduce(comm, data);
  if (comm.on_gpu()) return gpu::all_reduce(comm, data, choice, residual);
  check_all_reduce(comm, data, wire, residual);
  if (comm.size() == 1) return;
  const bool at_once = wire.bytes(data.elements(), data.dtype()) <= comm.workspace().layout.small();
  std::vector<Route> routes{Route::uncompressed, Route::one_shot};
  if (comm.size() > 2 && !at_once) routes.push_back(Route::two_shots);
  std::optional<Scratch> scratch;
  const Route route = route_for(
      comm, Args(Op::all_reduce, data), wire, data.elements(), routes, [&](Route candidate) {
        scratch ? scratch->renew() : void(scratch.emplace(data));
        const Tensor values = scratch->tensor();
        return timed(comm, [&] { run_all_reduce(comm, values, wire, nullptr, candidate); })();
      });
  scratch.reset();
  run_all_reduce(comm, data, wire, residual, route);
}

void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out,
                const AllowUncompressed& choice) {
  const Wire& wire = choice.wire;
  if (wire.is_none() || comm.size() == 1) return all_gather(comm, shard, out);
  if (comm.on_gpu()) return gpu::all_gather(comm, shard, out, choice);
  check_all_gather(comm, shard, out, wire);
  std::optional<Scratch> rows, whole;
  const Route route =
      route_for(comm, Args(Op::all_gather, out), wire, out.elements(),
                {Route::uncompressed, Route::one_shot}, [&](Route candidate) {
                  if (!rows) rows.emplace(shard), whole.emplace(out);
                  const Tensor from = rows->tensor(), to = whole->tensor();
                  return timed(comm, [&] { run_all_gather(comm, from, to, wire, candidate); })();
                });
  rows.reset(), whole.reset();
  run_all_gather(comm, shard, out, wire, route);
}

void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                    const AllowUncompressed& choice, const Tensor* residual) {
  const Wire& wire = choice.wire;
  if (wire.is_none() || comm.size() == 1) return reduce_scatter(comm, data, shard);
  if (comm.on_gpu()) return gpu::reduce_scatter(comm, data, shard, choice, residual);
  check_reduce_scatter(comm, data, shard, wire, residual);
  std::optional<Scratch> whole, rows;
  const Route route = route_for(
      comm, Args(Op::reduce_scatter, data), wire, data.elements(),
      {Route::uncompressed, Route::one_shot}, [&](Route candidate) {
        if (!whole) whole.emplace(data), rows.emplace(shard);
        const Tensor from = whole->tensor(), to = rows->tensor();
        return timed(comm, [&] { run_reduce_scatter(comm, from, to, wire, nullptr, candidate); })();
      });
  whole.reset(), rows.reset();
  run_reduce_scatter(comm, data, shard, wire, residual, route);
}

}  // namespace tandem
