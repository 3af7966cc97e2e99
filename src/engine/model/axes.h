// Axes of parallelism (engine/parallel/dims.h).
#pragma once

#include <cstdint>
#include <initializer_list>

namespace tandem {

/// From the one that varies fastest. Tensors are placed along those of a learner, all but `sync`.
enum class Axis : uint8_t { tp, cp, ep, expert_dp, pp, sync };
constexpr int kNumAxes = 6, kNumLearnerAxes = 5;

/// Set of axes: the ranks of a group differ on these.
class Axes {
 public:
  constexpr Axes(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) bits_ |= 1u << unsigned(axis);
  }
  constexpr bool has(int axis) const { return (bits_ >> axis & 1) != 0; }
  constexpr bool operator==(const Axes&) const = default;

 private:
  unsigned bits_ = 0;
};
constexpr Axes kTp{Axis::tp}, kCp{Axis::cp}, kDp{Axis::ep, Axis::expert_dp},
    kExperts{Axis::tp, Axis::ep}, kExpertDp{Axis::expert_dp}, kPp{Axis::pp}, kSync{Axis::sync};
/// Ranks with copies of the same parameters, whose gradients are summed: of all but the experts,
/// and of the experts.
constexpr Axes kCopies{Axis::cp, Axis::ep, Axis::expert_dp},
    kExpertCopies{Axis::cp, Axis::expert_dp};

}  // namespace tandem
