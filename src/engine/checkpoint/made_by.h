// The build and the machine that computed a checkpoint.
#pragma once

#include <map>
#include <string>

namespace tandem {

/// Version, commit, instruction set and libraries of this build, and this machine's processor: by
/// all of these the last bits of a result may differ.
std::map<std::string, std::string> build_identity();

/// One line that names what is another in `now` than in `then`; empty if nothing is, or where
/// `then` is: older checkpoints do not say.
std::string describe_change(const std::map<std::string, std::string>& then,
                            const std::map<std::string, std::string>& now);

}  // namespace tandem
