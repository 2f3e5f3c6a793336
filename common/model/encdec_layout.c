/* Five sections, each a table of rows: what is shared, then encoder and decoder with a table for
 * the side and one for its layers. A section's rows stand one after the other, layer by layer. */
#include "common/model/encdec_layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A side of a shape; FFN_DIM and POSITIONS are those of the section's side. */
typedef enum side { VECTOR, DIM, FFN_DIM, POSITIONS, VOCAB, SINGLE } side;

typedef struct row {
    const char *name;
    side rows; /* VECTOR: one dimension */
    side cols;
} row;

#define MAP(name, n_out, n_in)      \
    {name ".weight", n_out, n_in},  \
    {                               \
        name ".bias", VECTOR, n_out \
    }
#define NORM(name)                 \
    {name ".weight", VECTOR, DIM}, \
    {                              \
        name ".bias", VECTOR, DIM  \
    }
#define ATTENTION(prefix)                                                               \
    MAP(prefix "_q", DIM, DIM), MAP(prefix "_k", DIM, DIM), MAP(prefix "_v", DIM, DIM), \
        MAP(prefix "_output", DIM, DIM), NORM(prefix "_output_norm")
#define FEED_FORWARD \
    MAP("ffn_up", FFN_DIM, DIM), MAP("ffn_down", DIM, FFN_DIM), NORM("layer_output_norm")

static const row shared_rows[] = {{"token_embd.weight", VOCAB, DIM}};
static const row bias_rows[] = {{"output.bias", SINGLE, VOCAB}};
static const row side_rows[] = {{"position_embd.weight", POSITIONS, DIM}, NORM("token_embd_norm")};
static const row encoder_rows[] = {ATTENTION("attn"), FEED_FORWARD};
static const row decoder_rows[] = {ATTENTION("attn"), ATTENTION("cross_attn"), FEED_FORWARD};

typedef struct section {
    const char *prefix; /* with %d, the layer, when there are layers */
    const row *rows;
    int32_t n_rows;
    int32_t n_layers; /* of each row; 0 = it has none and counts once */
    bool is_encoder;
} section;

enum { N_SECTIONS = 6 };

#define SECTION(prefix, rows, n_layers, is_encoder)                      \
    (section)                                                            \
    {                                                                    \
        prefix, rows, (int32_t)PGD_ARRAY_LEN(rows), n_layers, is_encoder \
    }

static void list_sections(section out[N_SECTIONS], const model_config *cfg)
{
    out[0] = SECTION("", shared_rows, 0, false);
    out[1] = SECTION("", bias_rows, 0, false);
    out[1].n_rows = cfg->encdec.has_logits_bias;
    out[2] = SECTION("enc.", side_rows, 0, true);
    out[3] = SECTION("enc.blk.", encoder_rows, cfg->encdec.n_layers, true);
    out[4] = SECTION("dec.", side_rows, 0, false);
    out[5] = SECTION("dec.blk.", decoder_rows, cfg->n_layers, false);
}

static int32_t section_n_tensors(const section *s)
{
    return s->n_rows * PGD_MAX(s->n_layers, 1);
}

static int64_t side_elems(side which, const section *s, const model_config *cfg)
{
    switch (which) {
    case DIM:
        return cfg->dim;
    case FFN_DIM:
        return s->is_encoder ? cfg->encdec.ffn_dim : cfg->ffn_dim;
    case POSITIONS:
        return (int64_t)(s->is_encoder ? cfg->encdec.max_source : cfg->max_context) +
               cfg->encdec.position_offset;
    case VOCAB:
        return cfg->vocab_size;
    case VECTOR:
    case SINGLE:
        break;
    }
    return 1;
}

int32_t encdec_layout_n_tensors(const model_config *cfg)
{
    section sections[N_SECTIONS];
    int32_t n = 0;
    list_sections(sections, cfg);
    for (int32_t i = 0; i < N_SECTIONS; i++)
        n += section_n_tensors(&sections[i]);
    return n;
}

void encdec_layout_get_tensor(model_layout_tensor *out, const model_config *cfg, int32_t idx)
{
    section sections[N_SECTIONS];
    const section *s = sections;
    list_sections(sections, cfg);
    PGD_ASSERT(idx >= 0);
    for (; s < sections + N_SECTIONS && idx >= section_n_tensors(s); s++)
        idx -= section_n_tensors(s);
    PGD_ASSERT(s < sections + N_SECTIONS);
    const row *r = &s->rows[idx % s->n_rows];
    if (s->n_layers > 0)
        (void)snprintf(out->name, sizeof(out->name), "%s%" PRId32 ".%s", s->prefix, idx / s->n_rows,
                       r->name);
    else
        (void)snprintf(out->name, sizeof(out->name), "%s%s", s->prefix, r->name);
    bool is_vector = r->rows == VECTOR;
    out->n_dims = is_vector ? 1 : 2;
    out->dims[0] = side_elems(is_vector ? r->cols : r->rows, s, cfg);
    out->dims[1] = is_vector ? 1 : side_elems(r->cols, s, cfg);
    out->dims[2] = out->dims[3] = 1;
    out->values = is_vector ? MODEL_LAYOUT_FLOATS : MODEL_LAYOUT_WEIGHTS;
}

/* What follows a section's prefix and layer in name, else NULL. */
static const char *skip_prefix(const section *s, const char *name)
{
    size_t n = strlen(s->prefix);
    if (strncmp(name, s->prefix, n) != 0)
        return NULL;
    const char *p = name + n;
    if (s->n_layers == 0)
        return p;
    int64_t layer = 0;
    size_t n_digits = strspn(p, "0123456789");
    if (n_digits == 0 || n_digits > 9 || (p[0] == '0' && n_digits > 1) || p[n_digits] != '.')
        return NULL;
    for (size_t i = 0; i < n_digits; i++)
        layer = layer * 10 + (p[i] - '0');
    return layer < s->n_layers ? p + n_digits + 1 : NULL;
}

bool encdec_layout_has_tensor(const model_config *cfg, const char *name)
{
    section sections[N_SECTIONS];
    list_sections(sections, cfg);
    for (int32_t i = 0; i < N_SECTIONS; i++) {
        const char *rest = skip_prefix(&sections[i], name);
        for (int32_t k = 0; rest != NULL && k < sections[i].n_rows; k++) {
            if (strcmp(rest, sections[i].rows[k].name) == 0)
                return true;
        }
    }
    return false;
}

bool encdec_layout_may_ignore(const char *name)
{
    return strcmp(name, "enc.token_embd.weight") == 0 ||
           strcmp(name, "dec.token_embd.weight") == 0 || strcmp(name, "output.weight") == 0;
}
