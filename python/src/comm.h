// A rank as Python holds it. It owns the operators that are made on it, so that `close` ends them
// all, whatever Python still refers to; what is used afterwards raises by name.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "gpu.h"
#include "living.h"
#include "tandem/communicator.h"
#include "tandem/strategy.h"

namespace tandem::python {

namespace nb = nanobind;

class Comm : public std::enable_shared_from_this<Comm>, public Living<Comm> {
 public:
  /// `parent`: what this was split from.
  explicit Comm(std::shared_ptr<Communicator> comm, std::shared_ptr<Comm> parent = nullptr);
  ~Comm();

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool closed() const { return !comm_; }
  /// Whether a thread is inside a call.
  bool busy() const { return busy_; }

  /// `call(Communicator&)` without the GIL. Throws InvalidArgument naming `what` when closed, or
  /// while another thread is inside a call.
  template <typename Call>
  auto use(std::string_view what, const Call& call) {
    return within(what, {}, call);
  }
  /// The same for what works on tensors of `like`'s framework: on a GPU in the order of its current
  /// stream (gpu.h), of JAX, which has none, until the work has ended. Throws InvalidArgument for
  /// another framework than PyTorch, CuPy and JAX there.
  template <typename Call>
  auto use(std::string_view what, nb::handle like, const Call& call) {
    return within(what, caller(what, like), call);
  }
  /// Throws InvalidArgument naming `what` where a graph is captured on a framework's current stream
  /// of this rank's GPU.
  void refuse_capture(std::string_view what) const;
  /// nullptr of a CPU rank.
  GpuRank* gpu() const { return gpu_.get(); }
  /// Throws InvalidArgument naming `what` when closed.
  Communicator& open(std::string_view what) const;

  template <typename Thing>
  Thing* own(std::unique_ptr<Thing> thing) {
    Thing* const raw = thing.get();
    owned_[raw] = std::shared_ptr<Thing>(std::move(thing));
    return raw;
  }
  /// Destroys what `own` returned, now or, while a thread is inside a call, behind it.
  void drop(const void* owned);

  std::shared_ptr<Comm> split(int color, int key);
  /// From any thread, also while another is inside a call.
  void abort(const std::string& reason) const;
  void close();

 private:
  class InUse {
   public:
    InUse(Comm& comm, std::string_view what);
    ~InUse();

   private:
    Comm& comm_;
  };
  using Owned = std::map<const void*, std::shared_ptr<void>>;
  using Things = std::vector<std::shared_ptr<void>>;

  /// Who calls a GPU rank.
  struct Caller {
    std::optional<StreamNumber> stream = {};  ///< that the call follows and leads
    bool waits = false;                       ///< for the end of the call's work
  };

  template <typename Call>
  auto within(std::string_view what, const Caller& caller, const Call& call) {
    const InUse in_use(*this, what);
    const nb::gil_scoped_release unlocked;
    OnRank on_rank(gpu_.get(), caller.stream, what);
    const auto end = [&] {
      on_rank.done();
      if (caller.waits) gpu_->synchronize();
    };
    if constexpr (std::is_void_v<std::invoke_result_t<const Call&, Communicator&>>) {
      call(*comm_);
      end();
    } else {
      auto result = call(*comm_);
      end();
      return result;
    }
  }
  Caller caller(std::string_view what, nb::handle like) const;
  void free_dropped();
  static void end(Owned owned, Things dropped, std::unique_ptr<GpuRank> gpu,
                  std::shared_ptr<Communicator> comm);

  std::shared_ptr<Comm> parent_;
  std::shared_ptr<Communicator> comm_;
  std::unique_ptr<GpuRank> gpu_;
  std::thread::id thread_;  // the last one to use a GPU rank
  const int rank_, size_;
  bool busy_ = false;  // as all of this, with the GIL held
  Owned owned_;
  Things dropped_;
  std::vector<std::weak_ptr<Comm>> parts_;
};

void bind_comm(nb::module_& m);
void bind_world(nb::module_& m);
void bind_operators(nb::module_& m);
void bind_collectives(nb::module_& m);
void bind_collective_objects(nb::module_& m);
void bind_moe(nb::module_& m);

/// Throws InvalidArgument for another name.
Strategy strategy_from(const std::string& name);

}  // namespace tandem::python
