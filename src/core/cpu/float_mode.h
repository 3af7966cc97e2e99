// Float mode of a thread: control bits by which the same kernel gives other bits. A host library
// that was compiled with -ffast-math has its threads flush subnormals, and so do the OpenMP threads
// that these create.
#pragma once

#include <cstdint>

namespace tandem::cpu {

/// Scope in which this thread keeps subnormals and rounds to nearest; its end restores the thread's
/// own mode. If the thread had another one, its OpenMP threads get this mode, too, and keep it.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  const uint64_t before_;
};

/// Gives this mode to the OpenMP threads of this thread, unless as many had it before.
void reset_team();

}  // namespace tandem::cpu
