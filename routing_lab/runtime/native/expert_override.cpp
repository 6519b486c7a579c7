// Per-block expert counts for an unmodified libllama.
//
// libllama calls two of its own functions through its symbol table: the long form of
// llm_graph_context::build_moe_ffn, which builds the routed experts of one block, and
// llama_hparams::n_expert_used, which that function asks how many expert outputs to add up. A library that
// comes first in the symbol search and defines both decides how many experts the block consults: it replaces the
// argument of the first, answers the second with the same number, and leaves the work to the originals.
//
// Two ways in:
//   in process   dlopen this file with RTLD_GLOBAL before libllama, then routing_lab_bind and routing_lab_set;
//   LD_PRELOAD   with ROUTING_LAB_EXPERTS="0-6:6,7-32:5" in the environment (block or block range : experts).
//
// The schedule is one per process and is read when a graph is built. llama.cpp reuses graphs, so a change takes
// effect in a context that is created after it; set it before each build when several contexts are alive.
//
// Signatures are those of llama.cpp from September to October 2026 on Linux x86-64 and aarch64. Only their mangled
// names and their calling convention matter, so forward declarations replace llama.cpp's headers.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#define EXPORTED __attribute__((visibility("default")))

struct ggml_tensor;
enum llm_ffn_op_type : int;
enum llama_expert_gating_func_type : int;

struct EXPORTED llama_hparams {
    uint32_t n_expert_used(uint32_t il) const;
};

struct EXPORTED llm_graph_context {
    ggml_tensor * build_moe_ffn(
        ggml_tensor * cur, ggml_tensor * gate_inp, ggml_tensor * gate_inp_b, ggml_tensor * up_exps,
        ggml_tensor * up_exps_b, ggml_tensor * gate_exps, ggml_tensor * gate_exps_b, ggml_tensor * down_exps,
        ggml_tensor * down_exps_b, ggml_tensor * exp_probs_b, int64_t n_expert, int64_t n_expert_used,
        llm_ffn_op_type type_op, bool norm_w, float w_scale, llama_expert_gating_func_type gating_op, int il,
        ggml_tensor * probs_in, ggml_tensor * gate_up_exps, ggml_tensor * gate_up_exps_b, ggml_tensor * up_exps_s,
        ggml_tensor * gate_exps_s, ggml_tensor * down_exps_s, ggml_tensor * selected_experts_in) const;
};

namespace {

constexpr const char * ENVIRONMENT = "ROUTING_LAB_EXPERTS";
constexpr int EXIT_UNSUPPORTED = 4; // the exit code of the whole product for "the runtime cannot do this"
constexpr uint32_t BLOCK_LIMIT = 4096; // far above llama.cpp's own limit; keeps a typing error from taking gigabytes

constexpr const char * BUILD_MOE_FFN =
    "_ZNK17llm_graph_context13build_moe_ffnEP11ggml_tensorS1_S1_S1_S1_S1_S1_S1_S1_S1_ll15llm_ffn_op_typebf"
    "29llama_expert_gating_func_typeiS1_S1_S1_S1_S1_S1_S1_";
constexpr const char * N_EXPERT_USED = "_ZNK13llama_hparams13n_expert_usedEj";

// A member function is called like a free one that takes `this` first (Itanium C++ ABI, both architectures).
using BuildMoeFfn = ggml_tensor * (*)(
    const llm_graph_context *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *,
    ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, int64_t, int64_t, llm_ffn_op_type, bool,
    float, llama_expert_gating_func_type, int, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *,
    ggml_tensor *, ggml_tensor *, ggml_tensor *);
using NExpertUsed = uint32_t (*)(const llama_hparams *, uint32_t);

[[noreturn]] void refuse(const std::string & why) {
    std::fprintf(stderr, "routing_lab: %s\n", why.c_str());
    std::_Exit(EXIT_UNSUPPORTED);
}

// ---- the schedule ---------------------------------------------------------------------------------------------------

struct Schedule {
    std::string text;
    std::vector<uint32_t> experts; // by block; 0: not listed, the model's own count stays

    uint32_t of(int block) const {
        return block >= 0 && static_cast<size_t>(block) < experts.size() ? experts[static_cast<size_t>(block)] : 0;
    }
};

// Reads digits at `at` and moves behind them.
uint32_t parse_number(const std::string & text, size_t & at) {
    const size_t from = at;
    uint64_t value = 0;
    while (at < text.size() && text[at] >= '0' && text[at] <= '9' && at - from < 9) {
        value = value * 10 + static_cast<uint64_t>(text[at++] - '0');
    }
    if (at == from) {
        throw std::invalid_argument("a number is expected at position " + std::to_string(from + 1));
    }
    return static_cast<uint32_t>(value);
}

void expect(const std::string & text, size_t & at, char wanted) {
    if (at >= text.size() || text[at] != wanted) {
        throw std::invalid_argument(std::string("'") + wanted + "' is expected at position " + std::to_string(at + 1));
    }
    ++at;
}

// One entry, "7:5" or "7-32:5".
void parse_entry(const std::string & text, size_t & at, std::vector<uint32_t> & experts) {
    const uint32_t first = parse_number(text, at);
    uint32_t last = first;
    if (at < text.size() && text[at] == '-') {
        last = parse_number(text, ++at);
    }
    expect(text, at, ':');
    const uint32_t count = parse_number(text, at);
    if (last < first || last >= BLOCK_LIMIT) {
        throw std::invalid_argument("block range " + std::to_string(first) + "-" + std::to_string(last) + " is impossible");
    }
    if (count == 0) {
        throw std::invalid_argument("block " + std::to_string(first) + " cannot consult 0 experts");
    }
    experts.resize(std::max<size_t>(experts.size(), last + 1));
    for (uint32_t block = first; block <= last; ++block) {
        if (experts[block] != 0) {
            throw std::invalid_argument("block " + std::to_string(block) + " is given twice");
        }
        experts[block] = count;
    }
}

std::shared_ptr<const Schedule> parse_schedule(const std::string & text) {
    auto schedule = std::make_shared<Schedule>();
    schedule->text = text;
    try {
        for (size_t at = 0; at < text.size() || at == 0;) {
            parse_entry(text, at, schedule->experts);
            if (at < text.size()) {
                expect(text, at, ',');
                if (at == text.size()) {
                    throw std::invalid_argument("an entry is expected after the last ','");
                }
            }
        }
    } catch (const std::invalid_argument & problem) {
        throw std::invalid_argument("bad expert counts \"" + text + "\": " + problem.what() +
                                    "; the form is \"0-6:6,7-32:5\" (blocks:experts)");
    }
    return schedule;
}

// ---- what the process knows -----------------------------------------------------------------------------------------

struct Built {
    int64_t asked;    // the count that libllama wanted
    int64_t selected; // the count it was given
    int64_t summed;   // the length of the sum, or -1 when libllama did not ask for it through its symbol table
};

struct State {
    std::mutex mutex;
    std::shared_ptr<const Schedule> schedule; // null: every block keeps the model's own count
    std::map<int, Built> built;               // by block, since the last reset
    bool announce = false;                    // say once that the schedule of the environment is in use
    std::atomic<BuildMoeFfn> build_moe_ffn{nullptr};
    std::atomic<NExpertUsed> n_expert_used{nullptr};
};

State & state() {
    static State * const leaked = new State; // never destroyed: graphs may be built while the process ends
    return *leaked;
}

std::shared_ptr<const Schedule> current_schedule() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    return state().schedule;
}

// The block whose experts this thread is building. n_expert_used answers with the schedule only in here, because
// loading derives tensor shapes from the same function.
struct Building {
    int block;
    uint32_t count; // 0: observe only
    int64_t summed;
};

thread_local Building * building = nullptr;

// What the model itself last answered on this thread. Every graph but a warm-up asks before its first block.
thread_local uint32_t own_count = 0;

struct Scope {
    Building * const outer = building;
    explicit Scope(Building & inner) { building = &inner; }
    ~Scope() { building = outer; }
    Scope(const Scope &) = delete;
    Scope & operator=(const Scope &) = delete;
};

// ---- the originals --------------------------------------------------------------------------------------------------

bool resolve_from(void * handle) {
    void * const build = dlsym(handle, BUILD_MOE_FFN);
    void * const used = dlsym(handle, N_EXPERT_USED);
    Dl_info self, found;
    // A search that ends in this library again found no original.
    if (!build || !used || !dladdr(reinterpret_cast<void *>(&resolve_from), &self) || !dladdr(build, &found) ||
        self.dli_fbase == found.dli_fbase) {
        return false;
    }
    state().n_expert_used = reinterpret_cast<NExpertUsed>(used);
    state().build_moe_ffn = reinterpret_cast<BuildMoeFfn>(build);
    return true;
}

// Without a bind the original lies behind this library in the search order, or, where a program loaded libllama
// privately as Python does, in the library that the call came from.
void resolve_for(void * caller) {
    if (resolve_from(RTLD_NEXT)) {
        return;
    }
    Dl_info info;
    if (dladdr(caller, &info) && info.dli_fname) {
        if (void * const handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
            const bool found = resolve_from(handle);
            dlclose(handle);
            if (found) {
                return;
            }
        }
    }
    refuse("the libllama of this process does not have both functions that the expert override replaces");
}

BuildMoeFfn original_build_moe_ffn(void * caller) {
    if (!state().build_moe_ffn) {
        resolve_for(caller);
    }
    return state().build_moe_ffn;
}

NExpertUsed original_n_expert_used(void * caller) {
    if (!state().n_expert_used) {
        resolve_for(caller);
    }
    return state().n_expert_used;
}

// ---- the decision ---------------------------------------------------------------------------------------------------

// How many experts the block gets instead of `asked`; 0: leave it alone.
uint32_t substitute(const Schedule * schedule, int block, int64_t n_expert, int64_t asked, bool chosen_elsewhere) {
    const uint32_t count = schedule ? schedule->of(block) : 0;
    // A warm-up graph wants every expert so that all weights are read once; it computes nothing that is used.
    const bool warm_up = asked == n_expert && own_count != static_cast<uint32_t>(n_expert);
    if (count == 0 || warm_up || chosen_elsewhere) {
        return 0;
    }
    if (count > n_expert) {
        refuse("block " + std::to_string(block) + " should consult " + std::to_string(count) + " experts and has " +
               std::to_string(n_expert));
    }
    return count;
}

void announce_once() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (state().announce) {
        state().announce = false;
        std::fprintf(stderr, "routing_lab: experts per block %s\n", state().schedule->text.c_str());
    }
}

void record(int block, const Built & built) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().built[block] = built;
}

void copy_text(const std::string & text, char * buffer, size_t size) {
    if (size > 0) {
        const size_t length = text.size() < size ? text.size() : size - 1;
        std::memcpy(buffer, text.data(), length);
        buffer[length] = '\0';
    }
}

// Under LD_PRELOAD the schedule comes with the environment. A server that cannot honour it must not start: it would
// answer with other counts than its operator believes.
__attribute__((constructor)) void read_environment() {
    const char * const text = std::getenv(ENVIRONMENT);
    if (!text) {
        return;
    }
    try {
        state().schedule = parse_schedule(text);
    } catch (const std::invalid_argument & problem) {
        refuse(std::string(ENVIRONMENT) + ": " + problem.what());
    }
    state().announce = true;
    if (dlsym(RTLD_DEFAULT, "llama_decode") && !resolve_from(RTLD_NEXT)) {
        refuse(std::string(ENVIRONMENT) + " is set, but the libllama of this program does not have both functions that "
               "the expert override replaces (llama.cpp from September 2026 on, as a shared library, has them)");
    }
}

} // namespace

// ---- the two symbols ------------------------------------------------------------------------------------------------

uint32_t llama_hparams::n_expert_used(uint32_t il) const {
    const auto original = original_n_expert_used(__builtin_return_address(0));
    Building * const inside = building && building->block == static_cast<int>(il) ? building : nullptr;
    if (!inside) {
        return own_count = original(this, il);
    }
    const uint32_t answer = inside->count ? inside->count : original(this, il);
    inside->summed = answer;
    return answer;
}

ggml_tensor * llm_graph_context::build_moe_ffn(
        ggml_tensor * cur, ggml_tensor * gate_inp, ggml_tensor * gate_inp_b, ggml_tensor * up_exps,
        ggml_tensor * up_exps_b, ggml_tensor * gate_exps, ggml_tensor * gate_exps_b, ggml_tensor * down_exps,
        ggml_tensor * down_exps_b, ggml_tensor * exp_probs_b, int64_t n_expert, int64_t n_expert_used,
        llm_ffn_op_type type_op, bool norm_w, float w_scale, llama_expert_gating_func_type gating_op, int il,
        ggml_tensor * probs_in, ggml_tensor * gate_up_exps, ggml_tensor * gate_up_exps_b, ggml_tensor * up_exps_s,
        ggml_tensor * gate_exps_s, ggml_tensor * down_exps_s, ggml_tensor * selected_experts_in) const {
    const auto original = original_build_moe_ffn(__builtin_return_address(0));
    const auto schedule = current_schedule(); // kept alive for the whole build, whoever sets another one meanwhile
    Building here{il, substitute(schedule.get(), il, n_expert, n_expert_used, selected_experts_in != nullptr), -1};
    if (here.count) {
        announce_once();
    }
    const int64_t selected = here.count ? here.count : n_expert_used;
    const Scope scope(here);
    ggml_tensor * const out = original(
        this, cur, gate_inp, gate_inp_b, up_exps, up_exps_b, gate_exps, gate_exps_b, down_exps, down_exps_b,
        exp_probs_b, n_expert, selected, type_op, norm_w, w_scale, gating_op, il, probs_in, gate_up_exps,
        gate_up_exps_b, up_exps_s, gate_exps_s, down_exps_s, selected_experts_in);
    record(il, Built{n_expert_used, selected, here.summed});
    return out;
}

// ---- C interface ----------------------------------------------------------------------------------------------------

extern "C" {

// Takes the originals from the loaded library at `path`. 0: done; 1: `error` says why not.
EXPORTED int routing_lab_bind(const char * path, char * error, size_t size) {
    void * const handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) {
        copy_text(std::string(path) + " is not loaded", error, size);
        return 1;
    }
    const bool found = resolve_from(handle);
    dlclose(handle);
    if (!found) {
        copy_text(std::string(path) + " does not have both functions that the expert override replaces", error, size);
    }
    return found ? 0 : 1;
}

// Sets the schedule for every graph built from now on; an empty text returns to the model's own counts.
// 0: done; 1: `error` says what is wrong, and the schedule stays as it was.
EXPORTED int routing_lab_set(const char * text, char * error, size_t size) {
    std::shared_ptr<const Schedule> schedule;
    try {
        schedule = *text ? parse_schedule(text) : nullptr;
    } catch (const std::invalid_argument & problem) {
        copy_text(problem.what(), error, size);
        return 1;
    }
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().schedule = std::move(schedule);
    state().announce = false;
    return 0;
}

// What graphs were built with since the last reset, one line "block asked selected summed" for each block (its last
// build). Returns the length of the whole text without its end mark; call again with more room when it is >= size.
EXPORTED size_t routing_lab_report(char * buffer, size_t size) {
    std::string text;
    const std::lock_guard<std::mutex> lock(state().mutex);
    for (const auto & [block, built] : state().built) {
        text += std::to_string(block) + ' ' + std::to_string(built.asked) + ' ' + std::to_string(built.selected) + ' ' +
                std::to_string(built.summed) + '\n';
    }
    copy_text(text, buffer, size);
    return text.size();
}

EXPORTED void routing_lab_reset_report() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().built.clear();
}

} // extern "C"
