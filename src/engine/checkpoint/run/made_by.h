// Build and machine that computed a checkpoint.
#pragma once

#include <map>
#include <string>

namespace tandem {

/// Version, commit, instruction set and libraries of this build, and this machine's processor: with
/// any of these the last bits of a result may differ.
std::map<std::string, std::string> build_identity();

/// One line naming the differences of `now` from `then`; empty if there are none or `then` is
/// empty, as in older checkpoints.
std::string describe_change(const std::map<std::string, std::string>& then,
                            const std::map<std::string, std::string>& now);

}  // namespace tandem
