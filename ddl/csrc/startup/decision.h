// One decision for all ranks: rank 0 takes it from what all of them measured, and the others are told.
#pragma once

#include "forecast/choice.h"
#include "measure/probe.h"

namespace ddl {

// The same on every rank.
struct Decision {
    Plan plan;    // the world's
    Links links;  // that it was made of, for communicators of some ranks; without Tiers::reason
};

// The decision for measured links; collective. `say` gets lines about what was measured on rank 0, as many as the
// options' dbg_level asks for. Uses tags from `tag` to tag + kDecisionTags - 1. Throws Error on every rank if one
// fails.
constexpr Tag kDecisionTags = kProbeTags + 2;
Decision decide(Bootstrap& bootstrap, const Options& options, const Placement& placement, Tag tag,
                const std::function<void(const std::string&)>& say, const ProbeOptions& probe_options = {});

// Its form on the wire.
std::vector<std::byte> pack(const Decision& decision);
// Throws Error(DDL_ERROR_INTERNAL) if `data` is none.
Decision unpack(const std::vector<std::byte>& data);

}  // namespace ddl
